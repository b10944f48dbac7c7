# The modules that training needs on this cluster. Sourced by set_up.sh and train.sbatch, so that both have the same.
#   BATON_MODULES   names for `module load`, instead of those below

if command -v module > /dev/null; then
    case "${SYSTEMNAME:-}" in
        juwels | juwelsbooster | jurecadc | jusuf) : "${BATON_MODULES=Stages GCC CUDA Python}" ;;
    esac
    for name in ${BATON_MODULES:-}; do module load "$name"; done
fi
