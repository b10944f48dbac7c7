"""Merges a later version of the template into a project that scripts/new.py made: for `new.py update`.

The branch `template` holds the template as it was generated for this project, a commit for each version. The
project's own branches descend from it. So an update generates the new version with the recorded choices, commits it
there, and lets Git merge that branch: its three-way merge knows what the template changed and what you did.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHOICES = ".template.json"  # the project's name, and the parts that were chosen
BRANCH = "template"
MARK = "Generated-by: scripts/new.py project"  # in the message of each commit of the branch
COMMITTER = "template@localhost"  # of these commits: who amends, rebases or squashes one is another
IDENTITY = {f"GIT_{who}_NAME": "template" for who in ("AUTHOR", "COMMITTER")}
IDENTITY |= {f"GIT_{who}_EMAIL": COMMITTER for who in ("AUTHOR", "COMMITTER")}
REWRITTEN = (
    "this branch does not descend from the template as it was generated: its first commit was amended, or squashed; "
    "if it has all of the version {0}, say so by: git merge -s ours --allow-unrelated-histories {0}"
)


def merge(source: str) -> int:
    """Merge the template in a folder or at a Git URL into the branch that is checked out.

    Returns:
        0, or 1 if there are conflicts to solve.

    Raises:
        ValueError: Nothing can be merged here, or `source` holds no template. The files are as before.
    """
    if not (ROOT / CHOICES).is_file():
        raise ValueError(f"no {CHOICES} here: only a project that new.py project made can be updated")
    if git(ROOT, "rev-parse", "--show-prefix"):
        raise ValueError(
            f"{ROOT} is a folder of a larger Git repository: only a repository of its own can be updated"
        )
    if Path(git(ROOT, "rev-parse", "--absolute-git-dir"), "MERGE_HEAD").exists():
        raise ValueError("a merge is not finished: git commit ends it, git merge --abort undoes it")
    if git(ROOT, "status", "--porcelain", "--untracked-files=no"):
        raise ValueError("there are changes that are not committed: commit or stash them first")
    if f"branch refs/heads/{BRANCH}" in git(ROOT, "worktree", "list", "--porcelain").splitlines():
        raise ValueError(f"the branch {BRANCH} is checked out, which is new.py's own: switch to another one")
    last = newest_version()
    if run_git(ROOT, "merge-base", "HEAD", last).returncode:
        if git(ROOT, "rev-parse", "--is-shallow-repository") == "true":
            raise ValueError("this clone has a part of the history: git fetch --unshallow")
        raise ValueError(REWRITTEN.format(last[:12]))
    with tempfile.TemporaryDirectory() as place:
        template, made = find_template(source, Path(place)), Path(place, "made")
        command = [sys.executable, template / "scripts" / "new.py", "project", made, "-like", ROOT / CHOICES]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise ValueError(f"{source}: its new.py failed: {(run.stderr.strip() or 'no message').splitlines()[-1]}")
        git(ROOT, "fetch", "--quiet", str(made), BRANCH)
    if git(ROOT, "diff", "--name-only", last, "FETCH_HEAD"):
        message = git(ROOT, "log", "-1", "--format=%B", "FETCH_HEAD")
        last = git(ROOT, "commit-tree", "FETCH_HEAD^{tree}", "-p", last, "-m", message)
    git(ROOT, "update-ref", f"refs/heads/{BRANCH}", last)
    return merge_branch()


def newest_version() -> str:
    """Return the newest commit that holds the template as generated, in a branch of this name or in this history."""
    known = ("HEAD", f"--branches={BRANCH[:-1]}[{BRANCH[-1]}]", f"--remotes=*/{BRANCH}")  # a name alone is no pattern
    wanted = (f"--grep=^{MARK}$", f"--committer=<{COMMITTER}>")  # both
    found = git(ROOT, "rev-list", "--topo-order", "--max-count=1", *wanted, *known)
    # What an older new.py committed may have another committer; nobody else moves the branch.
    found = found or git(ROOT, "rev-list", "--max-count=1", wanted[0], known[1])
    if not found:
        raise ValueError(f"no version of the template in this repository: git fetch origin {BRANCH}:{BRANCH}")
    return found


def find_template(source: str, place: Path) -> Path:
    """Return the folder of the template; that of a Git URL is cloned into `place`."""
    folder = Path(source).resolve()
    if not (folder / "train.py").is_file():
        folder = place / "template"
        run = run_git(
            Path.cwd(), "-c", "core.autocrlf=false", "clone", "--quiet", "--depth=1", "--", source, str(folder)
        )
        if run.returncode:
            raise ValueError(f"{source}: no folder or Git URL of the template: {' '.join(run.stderr.split())}")
    if not (folder / "scripts" / "project.py").is_file():
        raise ValueError(f"{source}: not the template: it has no scripts/project.py")
    return folder


def merge_branch() -> int:
    """Merge the branch, and print what Git says. Returns the exit code."""
    run = subprocess.run(["git", "merge", "--no-edit", "--ff", BRANCH], cwd=ROOT, capture_output=True, text=True)
    if run.returncode == 0:
        print(run.stdout.strip(), "" if run.stdout.startswith("Already") else "try: ./scripts/test.sh", sep="\n")
        return 0
    if not git(ROOT, "ls-files", "--unmerged"):
        run_git(ROOT, "merge", "--abort")  # where a hook has refused it
        raise ValueError(f"git merge {BRANCH}: {' '.join((run.stderr + run.stdout).split())}")
    print(f"{run.stdout}new.py: solve the conflicts (git status lists them), then: git commit; or: git merge --abort")
    return 1


def run_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run git in a folder; what it commits is of IDENTITY."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, **IDENTITY})


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints. Raises ValueError if it fails."""
    run = run_git(folder, *arguments)
    if run.returncode:
        raise ValueError(f"git {arguments[0]} in {folder}: {' '.join(run.stderr.split())}")
    return run.stdout.strip()
