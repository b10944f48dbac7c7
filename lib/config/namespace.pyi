"""Written by scripts/flags_page.py: the types of the shared flags, so that an editor completes `args.`

A plugin's own flags are of type Any.
"""

import argparse

from lib.config import flags

class Args(argparse.Namespace):
    def __init__(self, **values) -> None: ...
    @property
    def flag_rules(self) -> flags.Rules: ...
    data: str
    out: str
    model: str
    cfg: str | None
    reset: bool
    tb: bool
    ngrok: bool
    ngrok_auth: str
    track: str
    mirror: str | None
    seed: int
    dataset: str
    batch_size: int
    batch_per_gpu: int | None
    micro_batch: int | None
    shuffle: bool
    shuffle_block: int
    balance: bool
    augment: bool
    drop_last: bool
    skip_bad_files: bool
    num_classes: int
    channels: int
    image_size: int
    arch: str
    trainer: str
    epochs: int
    steps: int | None
    eval_every: str
    loss: str
    label_smoothing: float
    class_weights: str | None
    ignore_index: int
    train_metrics: bool
    log_every: int
    step_times: bool
    peak_tflops: float | None
    max_bad_steps: int
    optimizer: str
    optimizer_arg: list[str]
    lr_schedule: str
    lr_start: float
    lr_end: float
    lr_warmup: float
    lr_batch: int | None
    weight_decay: float
    momentum: float
    clip_grad: float
    save_every: str
    keep_last: int
    keep_hours: int
    keep_every: int
    best: str | None
    stop_after: int | None
    resume: str | None
    weights: str | None
    allow_change: list[str]
    max_hours: float | None
    grace_s: float
    limit_steps: int | None
    check_resume: bool
    check_data: bool
    restarts: int
    hang_minutes: float
    gpus: str | None
    cpu: int | None
    workers: int | None
    val_workers: int | None
    threads: int | None
    fp16: bool
    bf16: bool
    cache_dir: str | None
    cache_gb: float | None
    parallel: str
    find_unused: bool
    recompute: bool
    compile: str | None
    channels_last: bool
    deterministic: bool | None
    debug: bool
    eval: bool
    overfit: int | None
    slurm: bool
    slurm_nnodes: int
    slurm_ngpus: int
    slurm_nodelist: str | None
    slurm_partition: str | None
    slurm_timeout: int | None
    slurm_cpus: int | None
    slurm_arg: list[str]
    slurm_signal_s: int
    slurm_dir: str | None
    slurm_dry: bool
