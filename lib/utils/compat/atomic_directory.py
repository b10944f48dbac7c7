"""cycling_utils' atomic saving: torch.save in one instant, and folders that ranks write together."""

import re
from pathlib import Path

import torch

from lib.utils import distributed
from lib.utils.checkpoint import atomic
from lib.utils.distributed import World

STRATEGIES = ("sync_any", "sync_all", "async", "mono", "offline")  # offline: another name that mono has had


def atomic_torch_save(obj, f: str | Path, **kwargs):
    """torch.save, but f becomes the new file in one instant, whole and on disk. Raises OSError."""
    with atomic.new_version(Path(f)) as partial, partial.open("wb") as file:
        torch.save(obj, file, **kwargs)


class AtomicDirectory:
    """Checkpoint folders NAME_checkpoint_0, _1, ... and a link NAME.latest_checkpoint to the newest complete one.

    Every rank makes one; one of them passes is_master=True.
    "sync_any", "sync_all": all ranks share a folder; it is kept for good (suffix _force) if any, or all, force it.
    "async": each rank has its own NAME_rank_R_checkpoint_0, ... and link, and waits for nobody.
    "mono": one process, which talks to no other even if there is a group.

    keep_last: how many complete folders to keep, not counting those kept for good; -1: all. device: not needed here.
    The link's target is an absolute path; in a tree that was moved or copied, a new AtomicDirectory fixes the link.
    An OSError of one rank is raised on all. Raises ValueError if strategy or masters do not fit.
    """

    def __init__(
        self,
        output_directory,
        is_master=False,
        name="AtomicDirectory",
        keep_last=-1,
        strategy="sync_any",
        device=None,
    ):
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy {strategy!r}: one of {', '.join(STRATEGIES)} is needed")
        self.world = World() if strategy in ("mono", "offline") else distributed.current_world()
        masters = sum(distributed.gather(bool(is_master), self.world))
        if self.world.size > 1 and strategy != "async" and masters != 1:
            raise ValueError(f"is_master=True on {masters} of {self.world.size} ranks: exactly one is needed")
        if strategy == "async":
            name, self.world = f"{name}_rank_{self.world.rank}", World(rank=self.world.rank)
        self.output_directory = Path(output_directory).absolute()
        self.name, self.keep_last, self.strategy = name, keep_last, strategy
        self.is_master = is_master or self.world.size == 1
        self.symlink_name = f"{name}.latest_checkpoint"
        self._link = self.output_directory / self.symlink_name
        self._writing = self.output_directory / f"{self.symlink_name}.partial"  # names a folder that is incomplete
        self._together(self._fix_link)

    def prepare_checkpoint_directory(self, force_save: bool = False) -> str:
        """The absolute path of a new, empty folder, one for all ranks that share it. Removes unfinished ones."""
        forces = self._together(lambda: bool(force_save))
        forced = all(forces) if self.strategy == "sync_all" else any(forces)
        names = self._together(lambda: self._make(forced) if self.is_master else None)
        return str(self.output_directory / next(name for name in names if name))

    def symlink_latest(self, checkpoint_directory: str | Path):
        """Makes a folder the latest once all ranks have come here: all in it on disk, link swapped, old ones removed.

        Raises OSError; the link is then still the old one, unless it was the removal that failed.
        """
        path = self.output_directory / Path(checkpoint_directory).name
        self._together(lambda: None)  # all have finished writing
        self._together(lambda: self._settle(path, checkpoint_directory))
        self._together(lambda: self._finish(path) if self.is_master else None)

    def is_checkpoint_directory(self, path_str: str | Path) -> str | None:
        """Return "12", or "12_force", of this saver's folder NAME_checkpoint_12; None for anything else."""
        path = Path(path_str)
        match = re.fullmatch(re.escape(self.name) + r"_checkpoint_(\d+(_force)?)", path.name)
        return match[1] if match and path.is_dir() else None

    def _fix_link(self):
        self.output_directory.mkdir(parents=True, exist_ok=True)
        latest = self._latest() if self.is_master else None
        if latest and not (self._link.is_symlink() and self._link.readlink() == latest):
            if self._link.is_dir() and not self._link.is_symlink():  # of a copy that followed links, as scp -r does
                self._link.rename(f"{self._link}.aside")
            with atomic.new_version(self._link) as partial:
                partial.symlink_to(latest)

    def _make(self, forced):
        latest, folders = self._latest(), self._folders()
        linked = folders[latest] if latest else -1
        for path, number in folders.items():
            unlinked = number > linked and not path.name.endswith("_force")
            if path != latest and (unlinked or path == self._unfinished()):
                atomic.remove_folder(path)
        atomic.sweep(self.output_directory, (f"{self.name}_checkpoint_", f"{self.symlink_name}."))
        number = 1 + max(self._folders().values(), default=-1)
        path = self.output_directory / f"{self.name}_checkpoint_{number}{'_force' if forced else ''}"
        atomic.write_file(self._writing, path.name)
        path.mkdir()
        return path.name

    def _settle(self, path, given):
        if path not in self._folders() or not path.samefile(given):
            raise FileNotFoundError(f"{given}: is no checkpoint folder of {self.output_directory}")
        for entry in (*path.rglob("*"), path):  # by every rank: on a network disk the writer's host must
            if not entry.is_symlink():
                atomic.fsync(entry)

    def _finish(self, path):
        atomic.fsync(self.output_directory)
        with atomic.new_version(self._link) as partial:
            partial.symlink_to(path)
        self._writing.unlink(missing_ok=True)
        folders = self._folders()
        for folder, number in folders.items() if self.keep_last > 0 else ():
            if number <= folders[path] - self.keep_last and not folder.name.endswith("_force"):
                atomic.remove_folder(folder)

    def _latest(self):
        """The newest complete folder: the link's target, or where that is lost, the last that nobody was writing."""
        link = self._link  # a copy may have made a file of it
        target = link.readlink() if link.is_symlink() else link.read_text().strip() if link.is_file() else "lost"
        path = self.output_directory / Path(target).name
        folders = self._folders()
        return path if path in folders else next((f for f in reversed(folders) if f != self._unfinished()), None)

    def _unfinished(self):
        return self.output_directory / (self._writing.read_text() if self._writing.is_file() else "none")

    def _folders(self):  # and their numbers, ascending
        suffixes = {entry: self.is_checkpoint_directory(entry) for entry in self.output_directory.iterdir()}
        numbers = {entry: int(suffix.split("_")[0]) for entry, suffix in suffixes.items() if suffix}
        return dict(sorted(numbers.items(), key=lambda item: item[1]))

    def _together(self, action):
        return distributed.gather_results(action, self.world)
