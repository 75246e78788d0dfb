# Services that need no accelerator: env, orchestrator, and the volley command.
# The dependencies are a layer of their own, made from the lock alone: a change of code rebuilds none of them.

FROM python:3.13-slim AS dependencies
ENV UV_PROJECT_ENVIRONMENT=/opt/volley UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
WORKDIR /app
COPY pyproject.toml uv.lock docker/sync.sh ./
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache \
    sh sync.sh --extra environments --extra tools --extra traces

FROM python:3.13-slim
RUN useradd --uid 10001 --user-group --no-log-init --home-dir /home/volley --create-home volley \
    && install -d -o volley -g volley /runs /cache /environments
COPY --from=dependencies /opt/volley /opt/volley
ENV PATH=/opt/volley/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV HF_HOME=/cache/huggingface MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /app
COPY pyproject.toml uv.lock ./
COPY configs configs
COPY docker docker
COPY shared shared
COPY services services
COPY volley volley
RUN python -m compileall -q services shared volley
USER volley
