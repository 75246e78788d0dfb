// Shows the document beside this page; requests go to where the page came from, also below a prefix.
const base = new URL(".", document.baseURI).href.replace(/\/$/, "");

fetch(`${base}/openapi.json`)
  .then((answer) => answer.json())
  .then((spec) => {
    window.ui = SwaggerUIBundle({
      spec: { ...spec, servers: [{ url: base }] },
      dom_id: "#swagger-ui",
      deepLinking: true,
      tryItOutEnabled: true,
      displayRequestDuration: true,
      validatorUrl: null,
    });
  });
