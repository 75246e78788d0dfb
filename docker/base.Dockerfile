# Services that need no accelerator: env, orchestrator, and the volley command.
# The dependencies are a layer of their own, made from the lock alone: a change of code rebuilds none of them.

# Of the packages only the project files: the layer of dependencies is kept until one of those changes.
FROM python:3.13-slim AS projects
COPY packages /packages
RUN find /packages -type f ! -name pyproject.toml -delete && find /packages -type d -empty -delete

FROM python:3.13-slim AS dependencies
ENV UV_PROJECT_ENVIRONMENT=/opt/volley UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
WORKDIR /app
COPY pyproject.toml uv.lock hatch_build.py docker/sync.sh ./
COPY --from=projects /packages packages
RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache \
    sh sync.sh --all-packages --extra libraries --extra tools --extra traces

FROM python:3.13-slim
RUN useradd --uid 10001 --user-group --no-log-init --home-dir /home/volley --create-home volley \
    && install -d -o volley -g volley /runs /cache /environments
COPY --from=dependencies /opt/volley /opt/volley
ENV PATH=/opt/volley/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV HF_HOME=/cache/huggingface MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /app
COPY pyproject.toml uv.lock ./
COPY configs configs
COPY recipes recipes
COPY docker docker
COPY shared shared
COPY services services
COPY volley volley
COPY packages packages
RUN python -m compileall -q services shared volley packages
USER volley
