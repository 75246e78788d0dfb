#!/bin/sh
# Saves the volumes of a stopped stack into a folder, or loads them into a new stack, here or on another machine.
#
#   sh docker/volumes.sh save FOLDER
#   docker compose create && sh docker/volumes.sh load FOLDER
#
# One tar file for each volume; `cache` (made again) and `prometheus` are left out. The files hold the stack's secrets.
# The stack is that of COMPOSE_PROJECT_NAME, `volley` without it. A volume that is not empty is never overwritten.
set -eu
umask 077
project=${COMPOSE_PROJECT_NAME:-volley}
volumes="secrets redis environments orchestrator runs"

fail() { echo "volumes.sh: $1" >&2; exit 1; }
within() {  # within VOLUME COMMAND...: runs it in /volume
    volume=$1; shift
    docker run --rm -i --network none --user 0 --workdir /volume -v "${project}_$volume:/volume" volley-base "$@"
}

case "${1:-}" in save | load) ;; *) fail "usage: volumes.sh save|load FOLDER" ;; esac
[ -n "${2:-}" ] || fail "usage: volumes.sh save|load FOLDER"
[ -z "$(docker ps --quiet --filter "label=com.docker.compose.project=$project")" ] ||
    fail "the stack $project runs: docker compose stop"
[ "$1" = load ] || mkdir -p "$2"

for name in $volumes; do
    file=$2/$name.tar
    if [ "$1" = save ]; then
        [ ! -e "$file" ] || fail "$file exists: name a new folder"
        docker volume inspect "${project}_$name" >/dev/null 2>&1 || { echo "no volume ${project}_$name"; continue; }
        within "$name" tar -cf - . >"$file.part"
        mv "$file.part" "$file"
    elif [ -e "$file" ]; then
        docker volume inspect "${project}_$name" >/dev/null 2>&1 || fail "no volume ${project}_$name: docker compose create"
        [ -z "$(within "$name" ls -A </dev/null)" ] || fail "the volume ${project}_$name is not empty: docker compose down --volumes"
        within "$name" tar --numeric-owner -xpf - <"$file"
    fi
    echo "$name $(du -h "$file" 2>/dev/null | cut -f1)"
done
