#!/usr/bin/env bash
# Starts the server with the default model, runs examples/quickstart.py against it, stops the server.
# Run by `make quickstart`, which installs what is needed.
#
#   PORT=9000 scripts/quickstart.sh     a port of your choice; otherwise a free one
#   scripts/quickstart.sh --dry-run     only say what would be done
set -euo pipefail

PYTHON=.venv/bin/python
STATE_DIR=quickstart-state
LOG=$STATE_DIR/server.log
SERVER_PID=

main() {
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    local port url
    port=${PORT:-$(find_free_port)}
    url=http://127.0.0.1:$port
    echo "Starting the server on $url (checkpoints and log: $STATE_DIR/), then training with the SDK."
    if [[ ${1:-} == --dry-run ]]; then
        return
    fi

    trap stop_server EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    start_server "$port"
    wait_until_ready "$url"
    TINKER_BASE_URL=$url TINKER_API_KEY=tml-quickstart $PYTHON examples/quickstart.py
    print_next_steps
}

find_free_port() {
    $PYTHON -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

start_server() {
    mkdir -p "$STATE_DIR"
    .venv/bin/hosted-tinker serve --port "$1" --state-dir "$STATE_DIR" >"$LOG" 2>&1 &
    SERVER_PID=$!
}

stop_server() {
    if [[ -n $SERVER_PID ]] && kill "$SERVER_PID" 2>/dev/null; then
        wait "$SERVER_PID" || true
    fi
}

# Prints each phase of loading once.
wait_until_ready() {
    local phase='' shown=''
    while [[ $phase != ok ]]; do
        if ! kill -0 "$SERVER_PID" 2>/dev/null; then
            echo "The server ended while starting. The end of $LOG:" >&2
            tail -n 20 "$LOG" >&2
            exit 1
        fi
        phase=$(read_phase "$1")
        if [[ $phase != "$shown" ]]; then
            echo "  ${phase/#ok/ready}"
            shown=$phase
        fi
        sleep 0.5
    done
}

# "ok", or what the server is doing instead.
read_phase() {
    $PYTHON - "$1/api/v1/healthz" <<'END'
import json, sys, urllib.request

try:
    health = json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=10))
except OSError:
    print("starting")
else:
    print("ok" if health["status"] == "ok" else health.get("phase", health["status"]))
END
}

print_next_steps() {
    cat <<END

The adapters are in $STATE_DIR/checkpoints, in PEFT's layout.

To go on:
  make serve                                        keeps a server running on port 8000
  export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any
  .venv/bin/python examples/quickstart.py           any program that uses the Tinker SDK
  make serve ARGS="--base-model DIRECTORY_OR_ID"    serves another model
END
}

main "$@"
