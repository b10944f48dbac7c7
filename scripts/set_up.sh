# Makes .venv with all that Baton needs, or updates it. Sourced by train.sh and test.sh.
#   PYTHON            the python to make it with (python3)
#   UV_TORCH_BACKEND  which build of torch: cpu, auto, cu128, ... (the package index's own)

set_up() {
    group="${1:-}"
    [ -n "${UV_TORCH_BACKEND:-}" ] || unset UV_TORCH_BACKEND # empty, uv takes it for a wrong one
    mark=".venv/.installed${group:+_$group}"
    wanted="$(cat pyproject.toml) ${UV_TORCH_BACKEND:-}"
    if [ -x .venv/bin/python ] && [ "$(cat "$mark" 2>/dev/null)" = "$wanted" ]; then return; fi

    python="${PYTHON:-python3}"
    if ! .venv/bin/python -c "" 2>/dev/null; then # none yet, or its Python was removed
        if ! "$python" -c "import sys; sys.exit(sys.version_info < (3, 10))" 2>/dev/null; then
            found="$("$python" -V 2>/dev/null || true)"
            echo "baton: $python is ${found:-missing}, and 3.10 or newer is needed: PYTHON=python3.12, for example" >&2
            return 1
        fi
        "$python" -m venv --clear .venv
    fi
    uv="$(command -v uv || command -v .venv/bin/uv || true)"
    if [ -z "$uv" ]; then
        echo "baton: installing uv into .venv (about 25 MB)" >&2
        .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv # an interrupted set-up has no pip
        .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
        uv=.venv/bin/uv
    fi
    echo "baton: installing the packages of pyproject.toml${group:+ and its group $group} into .venv" >&2
    if [ -z "${UV_TORCH_BACKEND:-}" ] && ! compgen -G ".venv/.installed*" >/dev/null && ! may_have_gpu; then
        echo "baton: there is no GPU here, and PyTorch without CUDA is some GB smaller:" \
            "stop this (Ctrl-C), then type: export UV_TORCH_BACKEND=cpu" >&2
    fi
    # Compiled now: importing torch takes twice as long where Python may not keep what it compiled.
    if ! "$uv" pip install --python .venv/bin/python --compile-bytecode -r pyproject.toml ${group:+--group "$group"}; then
        [ -z "${UV_TORCH_BACKEND:-}" ] || echo "baton: by UV_TORCH_BACKEND=$UV_TORCH_BACKEND torch comes from" \
            "download.pytorch.org: where that cannot be reached, unset UV_TORCH_BACKEND" >&2
        return 1
    fi
    printf '%s' "$wanted" > "$mark"
}

# On other systems than Linux the package index has no other build.
may_have_gpu() {
    [ "$(uname)" != Linux ] || command -v nvidia-smi >/dev/null || [ -e /dev/nvidia0 ] || [ -e /dev/kfd ]
}

set_up "${1:-}"
