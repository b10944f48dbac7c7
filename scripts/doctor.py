"""Would a run start here? python scripts/doctor.py [arguments of train.py].

Lists what is missing. Exit code 0: it would start; 1: what is marked `bad`
prevents it; 2: the arguments are wrong.
"""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
try:
    import torch
    import torch.distributed as dist

    from lib import config, launch
    from lib.config import plugins
    from lib.core import loss, optimizer, parallel
    from lib.launch import local
    from lib.utils import distributed, runtime
    from lib.utils.checkpoint import manager, resume, run_folder, state, weights
    from lib.utils.data import fetch, fingerprint, loader
    from lib.utils.distributed import World
    from lib.utils.errors import UsageError, load_optional, no_exit, printable
    from scripts import agent, check_data, model_input, reading
except ModuleNotFoundError as error:
    sys.exit(f"bad   {error.name} is missing: ./scripts/train.sh makes .venv with all that is needed")

OK, NOTE, BAD = "ok", "note", "bad"
SHM_BYTES, FILES = 1 << 30, 4096  # less shared memory or fewer open files may be too little for loader processes
Findings = Iterator[tuple[str, str]]


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "-help", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        args = config.parse_args(arguments)
        launch.prepare(args)
    except UsageError as error:
        return local.report_usage_error(error)
    bad = 0
    for check in CHECKS:
        for level, text in guarded(check, args):
            print(wrapped(level, text), flush=True)
            bad += level == BAD
    print(f"\na run would {'not start: see what is bad' if bad else 'start'}")
    return int(bool(bad))


def wrapped(level: str, text: str) -> str:
    """Return a finding in lines of the terminal's width, or 80. Paths and flags stay whole."""
    width = shutil.get_terminal_size().columns
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(printable(text), width, initial_indent=f"{level:5} ", subsequent_indent=" " * 6, **whole)


def guarded(check, args) -> Findings:
    """The findings of a check. An error in it is a finding, too."""
    try:
        with no_exit():
            yield from check(args)
    except Exception as error:  # noqa: BLE001  # whatever a plugin raises
        place = f"{check.__name__}: {type(error).__name__}: "
        place = "" if isinstance(error, UsageError) else place  # that one names its flag
        yield BAD, f"{place}{' '.join(str(error).split())}"


def versions(args) -> Findings:
    """Check Python and the packages that pyproject.toml requires."""
    yield OK, f"Python {platform.python_version()} on {platform.platform()}, host {socket.gethostname()}"
    listed = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)[1]
    found = []
    for name, least in re.findall(r'"([\w-]+)>=([\d.]+)', listed):
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield BAD, f"{name} is missing: ./scripts/train.sh makes .venv with all that is needed"
            continue
        found.append(f"{name} {have}")
        if numbers(have) < numbers(least):
            yield BAD, f"{name} {have} is older than {least}: ./scripts/train.sh brings .venv up to date"
    yield OK, ", ".join(found)


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.match(r"[\d.]*\d", version)[0].split(".")]


def reduction(args) -> Findings:
    """Add up a tensor on two processes, started like those of a run."""
    on_gpus = not args.cpu and torch.accelerator.device_count() > 1
    code = local.start_processes(
        config.parse_args([] if on_gpus else ["-cpu", "2"]), "scripts.doctor:add_up", 2, "doctor"
    )
    where = "two GPUs by NCCL" if on_gpus else "two processes on the CPU by gloo"
    yield (
        (BAD, f"an all-reduce over {where} failed: see above; NCCL_DEBUG=INFO shows more")
        if code
        else (OK, f"an all-reduce over {where} adds up")
    )


def add_up(args) -> int:
    """One of the two processes: returns 0 if the sum over both is 3. It gives up after a minute, wherever it is."""
    timeout = threading.Timer(60, os._exit, [1])
    timeout.daemon = True
    timeout.start()
    with distributed.join(args) as world:
        total = torch.tensor([world.rank + 1.0], device=world.device)
        torch.distributed.all_reduce(total)
        return int(total.item() != 3)


def devices(args) -> Findings:
    """Check the devices of a run, and the libraries for communication between its processes."""
    count = torch.cuda.device_count()
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        torch.ones(1, device=f"cuda:{index}").add(1).item()  # RuntimeError if this torch has no code for the GPU
        yield OK, f"GPU {index}: {facts.name}, {facts.total_memory / 1e9:.0f} GB"
    if torch.version.cuda and not count:
        yield (
            NOTE,
            f"torch is built for CUDA {torch.version.cuda} and sees no GPU: look at nvidia-smi, or train on the CPU",
        )
    processes = args.cpu or 1 if args.slurm else local.count_processes(args)
    if not args.slurm:
        distributed.pick_device(args, processes - 1)  # UsageError if a GPU is missing
    yield OK, f"{processes} process{'es' * (processes > 1)} here, {os.cpu_count()} CPU cores"
    have = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    needed = ["gloo", *(["nccl"] if count > 1 and not args.cpu else [])]
    for name in needed:
        yield (OK, f"torch has {name}") if have[name] else (BAD, f"torch has no {name}: install another build of it")


def limits(args) -> Findings:
    """Check what loader processes need: shared memory and open files."""
    shm = Path("/dev/shm")
    size = shutil.disk_usage(shm).free if shm.exists() else 0
    little = args.workers and size < SHM_BYTES
    advice = ": little for -workers; docker run --shm-size=8g, a pod's emptyDir with medium: Memory" if little else ""
    yield NOTE if little else OK, f"shared memory: {size / 1e9:.1f} GB free{advice}"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = args.workers and 0 <= files < FILES
    yield NOTE if few else OK, f"open files: {files} at most{': type ulimit -n 65536 first' if few else ''}"


def data(args) -> Findings:
    """Check the samples of the run, and whether the flags agree with them and with the run's checkpoints.

    Samples that are files are all opened.
    """
    splits = model_input.find_splits(args, args.overfit)
    yield OK, f"-dataset {args.dataset}: {', '.join(f'{len(part):,} {name}' for name, part in splits.items())}"
    chosen, slash, _ = (args.best or "").partition("/")  # val_x of val_x/f1; which metrics there are, a run knows
    sets = [name for name in splits if name.startswith("val")]
    if slash and sets and loader.SPLIT.fullmatch(chosen) and chosen not in sets:
        yield BAD, f"-best {args.best}: there is no {chosen}, but {', '.join(sets)}"
    lines = fetch.option(splits["train"], "log_lines", ())
    for line in lines:
        yield NOTE, line
    faults = {}
    if args.check_data or hasattr(splits["train"], "sample_name"):  # files that people bring
        faults = check_data.find_faults(splits, World(), args.seed)
    for number, text in faults.values():
        yield NOTE if args.skip_bad_files and not number else BAD, text
    past = resume.find(args, World())
    count = (args.cpu or args.slurm_ngpus) * args.slurm_nnodes if args.slurm else local.count_processes(args)
    before, facts = past.manifest["config"] if past else {}, {"samples": len(splits["train"])}
    if args.skip_bad_files or not faults:  # else a run would end at one of them
        splits = check_data.skip(splits, args, World(), past)[0] if args.skip_bad_files else splits
        if args.balance or (args.shuffle and fetch.lists(splits["train"], "weights", "lengths")):
            load_optional("scripts.sampling", "-balance").add_sampler(splits["train"], args)
        for line in fetch.option(splits["train"], "log_lines", ())[len(lines) :]:
            yield NOTE, line
        facts = fingerprint.describe(splits, args, World())
        if args.class_weights == "balanced":
            sampling = load_optional("scripts.sampling", "-class_weights balanced")
            sampling.balance_loss(loss.get_loss(args), splits["train"], args)
    plan = resume.plan(args, facts, World(size=count, local_size=count), before)
    runtime.choose_threads(args, World(local_size=count), before.get("threads"))
    if "classes" in facts:
        resume.check_flags(args, plan, past, before, splits)
    begins = f"resumes from {past.folder}" if past else "is a new run"
    yield OK, f"-model {args.model} {begins}: {plan.steps} steps an epoch, micro-batches of {plan.micro} samples"


def room(args) -> Findings:
    """Check the model of the run, its first weights, the space for its checkpoints, and its loss and optimizers."""
    arch = plugins.load("arch", args.arch)
    model = parallel.build(arch, args)
    if args.weights and resume.find(args, World()) is None:  # a resume does not read them
        yield OK, f"-weights {weights.load_into(args.weights, model, imagenet=lambda: arch.get_weights(args))}"
    size = manager.ADAM * sum(tensor.nbytes for tensor in state.model_tensors(model).values())
    yield OK, f"-arch {args.arch}: {sum(p.numel() for p in model.parameters()):,} parameters"
    folder = run_folder.path_of(args)
    if reading.is_locked(folder) and not (args.eval or args.debug):
        yield BAD, f"-model {args.model}: {folder} is in use by another run, see scripts/status.py"
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        yield BAD, f"-out {args.out}: {existing} cannot be written ({error.strerror}): take another folder"
        return
    free, kept = shutil.disk_usage(existing).free, args.keep_last + args.keep_hours
    wanted = size * (kept + 1)
    level = BAD if free < size else NOTE if free < wanted else OK
    yield (
        level,
        (
            f"-out {args.out}: {free / 1e9:.1f} GB free; a checkpoint takes about {size / 1e6:.1f} MB, of which "
            f"{kept} are kept (-keep_last, -keep_hours) and one is being written"
        ),
    )
    optimizer.get_optimizers(model, loss.get_loss(args), args)  # UsageError for an option that they do not take


def mirror(args) -> Findings:
    """Check whether the place of -mirror can be read. Nothing is written there."""
    if args.mirror and not (args.eval or args.debug):
        script = load_optional("scripts.mirror", "-mirror")
        place = script.Place(args.mirror, args.model)
        try:
            owner = place.read("owner.json")
        except Exception as error:  # noqa: BLE001  # each store has its own; it may name a password
            yield BAD, f"-mirror {place.url}: cannot be used ({script.clean(error)})"
            return
        yield OK, f"-mirror {place.url}: {'a run is there' if owner else 'no run is there'}"


def network(args) -> Findings:
    """Check by which name and interface other machines would reach this one."""
    host, existing = socket.gethostname(), [name for _, name in socket.if_nameindex()]
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(name, "").lstrip("^=").split(",")[0]
        if wanted and not any(one.startswith(wanted) for one in existing):
            yield BAD, f"{name}={os.environ[name]} is not one of the interfaces here: {', '.join(existing)}"
    try:
        address = socket.gethostbyname(host)
    except OSError:
        yield NOTE, f"{host} has no address: fine on one machine; for several, put it into DNS or /etc/hosts"
        return
    mine = agent.interface_of(address) or "no interface of this machine"
    message = f"several machines would meet at {host}, {address}, {mine}; processes of one use lo"
    unreachable = address.startswith("127.") or mine.startswith("no ")
    advice = "; others cannot reach that: correct /etc/hosts or name it by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    yield NOTE if unreachable else OK, f"{message}{advice if unreachable else ''} (there are {', '.join(existing)})"


def slurm(args) -> Findings:
    """Check what Slurm offers on this machine."""
    if not shutil.which("sinfo"):
        yield BAD if args.slurm else OK, "no Slurm here: -slurm would be refused; its login node has sinfo and sbatch"
        return
    command = ["sinfo", "-h", "-o", "%R: %D nodes %a, each %c CPUs, %m MB, %G; limit %l"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if answer.returncode:
        yield BAD if args.slurm else NOTE, f"sinfo does not answer: {answer.stderr.strip().splitlines()[-1]}"
        return
    for line in answer.stdout.splitlines():
        yield OK, f"Slurm partition {line.replace('(null)', 'no GPUs')}"
    names = {line.partition(":")[0] for line in answer.stdout.splitlines()}
    if args.slurm_partition and not set(args.slurm_partition.split(",")) <= names:
        yield BAD, f"-slurm_partition {args.slurm_partition}: there are {', '.join(sorted(names))}"


CHECKS = (versions, reduction, devices, limits, data, room, mirror, network, slurm)

if __name__ == "__main__":
    sys.exit(main())
