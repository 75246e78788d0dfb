#!/bin/sh
# Installs the locked dependencies of one environment of Python into $UV_PROJECT_ENVIRONMENT, and the project as a link to
# this folder, where its code comes later. Used while an image is built.
#
#   sync.sh [--all-packages] [--extra NAME] [--no-install-package NAME]...
#
# uv comes from the package index, in an environment of its own: the base image's Python may be managed by its distribution.
# A build secret named `ca` that holds certificates replaces the system's; without one, nothing changes.
set -eu

ca=/run/secrets/ca
if [ -s "$ca" ]; then
    export SSL_CERT_FILE="$ca" PIP_CERT="$ca"
fi

python -m venv /tmp/uv
/tmp/uv/bin/pip install --quiet --disable-pip-version-check "uv>=0.9,<1"
mkdir -p services shared volley
touch README.md services/__init__.py shared/__init__.py volley/__init__.py
for folder in packages/*; do
    mkdir -p "$folder/volley_${folder#packages/}"
    touch "$folder/README.md" "$folder/volley_${folder#packages/}/__init__.py"
done
/tmp/uv/bin/uv sync --locked --no-dev "$@"
rm -rf /tmp/uv
