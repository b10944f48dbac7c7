# Makes .venv with all that Baton needs, or updates it. Sourced by train.sh and test.sh.
#   PYTHON            the python to make it with (python3)
#   UV_TORCH_BACKEND  which build of torch: cpu, auto, cu128, ... (the package index's own)

set_up() {
    group="${1:-}"
    [ -n "${UV_TORCH_BACKEND:-}" ] || unset UV_TORCH_BACKEND # empty, uv takes it for a wrong one
    mark=".venv/.installed${group:+_$group}"
    wanted="$(cat pyproject.toml) ${UV_TORCH_BACKEND:-}"
    if [ -x .venv/bin/python ] && [ "$(cat "$mark" 2>/dev/null)" = "$wanted" ]; then return; fi

    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    uv="$(command -v uv || true)"
    if [ -z "$uv" ]; then
        .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
        uv=.venv/bin/uv
    fi
    echo "baton: installing into .venv (the first time a few GB, unless UV_TORCH_BACKEND=cpu)" >&2
    # Compiled now: importing torch takes twice as long where Python may not keep what it compiled.
    "$uv" pip install --quiet --python .venv/bin/python --compile-bytecode -r pyproject.toml ${group:+--group "$group"}
    printf '%s' "$wanted" > "$mark"
}

set_up "${1:-}"
