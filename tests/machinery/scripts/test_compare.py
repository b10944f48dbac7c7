"""scripts/compare.py says which flags, figures and tensors of two runs differ, and from which step on."""

import shutil

from runs import run
from saves import SMALL, at_step

from scripts import compare


def test_two_runs_are_compared_by_flags_figures_and_tensors(copy, finished_run, tmp_path, capsys):
    def compared(one, other, code) -> str:
        assert compare.main([str(one), str(other)]) == code
        return capsys.readouterr().out

    output = compared(copy, finished_run, code=0)
    assert "flags that differ: none" in output and "are the same, 0 differ" in output
    assert "best/weights.safetensors: the same\nfinal/weights.safetensors: the same\n" in output
    other = run(tmp_path / "other", f"{SMALL} -lr_end 1e-5 -save_every 1steps -keep_last 99 -log_every 1")
    output = compared(finished_run, other, code=1)
    assert "-lr_end 1e-06 and 1e-05" in output and "-cpu 2 and None" in output and "goes to" not in output
    assert "checkpoints/000002_step_2 and" in output, "the first step has the peak rate in both"
    assert "final/weights.safetensors: model.1.weight differs first: " in output
    short = run(tmp_path / "short", f"{SMALL} -limit_steps 3", wanted=75)
    output = compared(short, finished_run, code=1)
    assert f"{short} goes to step 3 (stopped), {finished_run} to step 12 (finished)\n" in output
    assert "final/weights.safetensors: only in B\n" in output and ", 0 differ" in output
    step = at_step(finished_run, 3)
    compared(f"{finished_run}/checkpoints/{step}", f"{copy}/checkpoints/{step}", code=0)
    compared(copy, f"{finished_run}/final/weights.safetensors", code=0)  # without the optimizer's
    compared(f"{finished_run}/final", f"{copy}/final", code=0)
    compared(finished_run, tmp_path / "none", code=2)
    for name, code in (("checkpoints", 0), ("best", 1), ("final", 2)):
        shutil.rmtree(copy / name)
        compared(copy, finished_run, code)
    assert compare.main([str(copy), str(copy)]) == 2 and "no tensors to compare: " in capsys.readouterr().err
    one = compare.torch.tensor([1j, 2])
    assert compare.describe(one, one + 1j) == "2 of 2 values, by 1 at most; the largest is 2"
