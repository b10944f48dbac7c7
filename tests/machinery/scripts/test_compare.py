"""scripts/compare.py says which flags, figures and tensors of two runs differ, and from which step on."""

from runs import run
from saves import SMALL, at_step

from scripts import compare


def test_two_runs_are_compared_by_flags_figures_and_tensors(copy, finished_run, tmp_path, capsys):
    assert compare.main([str(copy), str(finished_run)]) == 0
    output = capsys.readouterr().out
    assert "flags that differ: none" in output and "are the same, 0 differ" in output
    other = run(tmp_path / "other", f"{SMALL} -lr_end 1e-5 -save_every 1steps -keep_last 99 -log_every 1")
    assert compare.main([str(finished_run), str(other)]) == 1
    output = capsys.readouterr().out
    assert "-lr_end 1e-06 and 1e-05" in output and "-cpu 2 and None" in output
    assert "checkpoints/000002_step_2 and" in output, "the first step has the peak rate in both"
    step = at_step(finished_run, 3)
    assert compare.main([f"{finished_run}/checkpoints/{step}", f"{copy}/checkpoints/{step}"]) == 0
    final = f"{finished_run}/final/weights.safetensors"
    assert compare.main([str(copy), final]) == 0, "without the optimizer's"
    assert compare.main([final, str(tmp_path / "none")]) == 2
