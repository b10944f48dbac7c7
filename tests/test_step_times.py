"""-step_times: shares of a step's time, and the MFU by the operations that matrix products take."""

import pytest
from runs import lines, plugins, run, same_tensors, weights

from lib.trainer import trainer
from scripts import step_times

FLAGS = "-arch mlp -epochs 1 -log_every 4 -batch_size 64 -micro_batch 16"
PEAK = 0.01  # TFLOPS


class Evaluates(trainer.Trainer):
    def training_step(self, batch):
        self.evaluate("val")  # whose operations are none of the step's
        return super().training_step(batch)


@pytest.mark.parametrize("more", ["-cpu 1", "-cpu 2", "-cpu 2 -deterministic no", "-cpu 2 -trainer evaluates"])
def test_shares_and_mfu_are_logged_and_no_bit_changes(more, tmp_path):
    with plugins(trainer={"evaluates": Evaluates}):
        plain = run(tmp_path, f"{FLAGS} {more} -model plain")
        folder = run(tmp_path, f"{FLAGS} {more} -step_times -peak_tflops {PEAK} -model timed")
    assert same_tensors(weights(plain), weights(folder))
    first, *others = [value.numel() for value in weights(folder).values() if value.ndim == 2]
    # Each weight is multiplied and added once forward, and twice backward, but no gradient of the input is needed.
    wanted = 4 * first + 6 * sum(others)
    found = [line for line in lines(folder) if "perf/data_share" in line]
    for line in found:
        shares = [line[f"perf/{name}_share"] for name in ("data", *step_times.PHASES)]
        assert all(0 <= share < 1 for share in shares) and sum(shares) <= 1.001
        flops = line["perf/mfu_share"] * PEAK * 1e12 * int(more[5]) / line["perf/samples_per_s"]
        assert flops == pytest.approx(wanted)
    assert len(found) == 5
    assert (folder / "logs" / "rank_0.log").read_text().count(" %  mfu ") == 5
