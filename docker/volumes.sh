#!/bin/sh
# Saves the volumes of a stopped stack into a folder, or loads them into a new stack, here or on another machine.
#
#   sh docker/volumes.sh save FOLDER
#   docker compose create && sh docker/volumes.sh load FOLDER
#
# One tar file for each volume; `cache` (made again) and `prometheus` are left out. The files hold the stack's secrets.
# The stack is that of COMPOSE_PROJECT_NAME, in the environment or in .env; `volley` without it. A volume that is not empty
# is never overwritten. Without the volume `secrets` they are in a folder of yours (VOLLEY_SECRETS).
set -eu
umask 077
env_file=$(dirname "$0")/../.env
[ -n "${COMPOSE_PROJECT_NAME:-}" ] || [ ! -e "$env_file" ] ||
    COMPOSE_PROJECT_NAME=$(sed -n "s/^ *COMPOSE_PROJECT_NAME=[\"']*\([a-z0-9_-]*\).*/\1/p" "$env_file" | tail -n 1)
project=${COMPOSE_PROJECT_NAME:-volley}
volumes="secrets redis environments orchestrator runs"

fail() { echo "volumes.sh: $1" >&2; exit 1; }
within() {  # within VOLUME COMMAND...: runs it in /volume
    volume=$1; shift
    docker run --rm -i --network none --user 0 --workdir /volume -v "${project}_$volume:/volume" \
        "${VOLLEY_IMAGES:-}volley-base:${VOLLEY_TAG:-latest}" "$@"
}

case "${1:-}" in save | load) ;; *) fail "usage: volumes.sh save|load FOLDER" ;; esac
[ -n "${2:-}" ] || fail "usage: volumes.sh save|load FOLDER"
[ -z "$(docker ps --quiet --filter "label=com.docker.compose.project=$project")" ] ||
    fail "the stack $project runs: docker compose stop"
exists() { docker volume inspect "${project}_$1" >/dev/null 2>&1; }

# All is checked before anything is written.
for name in $volumes; do
    file=$2/$name.tar
    if [ "$1" = save ]; then
        [ ! -e "$file" ] || fail "$file exists: name a new folder"
        exists "$name" || [ "$name" = secrets ] || fail "no volume ${project}_$name: set COMPOSE_PROJECT_NAME, or start the stack once"
    else
        [ -e "$file" ] || [ "$name" = secrets ] || fail "no $file: name a folder that \`save\` has written"
        [ -e "$file" ] || continue
        exists "$name" || fail "no volume ${project}_$name: docker compose create"
        [ -z "$(within "$name" ls -A </dev/null)" ] || fail "the volume ${project}_$name is not empty: docker compose down --volumes"
    fi
done
[ "$1" = load ] || mkdir -p "$2"
for name in $volumes; do
    file=$2/$name.tar
    if [ "$1" = save ]; then
        exists "$name" || continue
        within "$name" tar -cf - . >"$file.part"
        mv "$file.part" "$file"
    else
        [ -e "$file" ] || continue
        within "$name" tar --numeric-owner -xpf - <"$file"
    fi
    echo "$name $(du -h "$file" | cut -f1)"
done
