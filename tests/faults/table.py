"""What breaks, and what must then happen: one row for each fault. Tests anywhere in `tests/` show a row by the marker
`@pytest.mark.fault("05")`; `make faults` runs them all, and `tests/faults/test_table.py` sees that no row is without.

Rows 01 to 32 are faults of machines, tools and data; B, S, m and W were found broken here once, by people who tried.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """One fault and what must happen."""

    key: str
    fault: str
    then: str


ROWS = (
    Row("01", "a Ray worker is killed in the middle of an epoch", "goes on from a checkpoint to the same weights"),
    Row("02", "`dvc repro` is killed while a stage runs", "the stage ends too; the next run needs no hand"),
    Row("03", "SIGTERM, as a cancelled flow sends it", "a checkpoint in the grace time, and no process is left"),
    Row("04", "everything is killed at once: the host is gone", "the next run does the work from what was kept"),
    Row("05", "the newest checkpoint is cut short by a loss of power", "the one before is used; a warning names both"),
    Row("06", "another dvc command holds DVC's lock as a stage ends", "it is waited for, and the stage is recorded"),
    Row("07", "DVC's rwlock is empty, or names a number that another process has now", "a flow run does not meet it"),
    Row("08", "dvc.lock is empty, or has the marks of a merge conflict", "a sentence with git's command, no traceback"),
    Row(
        "09", "a bit flips in a cache object or in the checkpoint", "named with both hashes; not scored, not registered"
    ),
    Row("10", "the disk is full at a checkpoint, in convert or in push", "what was whole stays; try again, room named"),
    Row("11", "fewer GPUs are there than were asked for", "refused within a minute with have and need"),
    Row("12", "out of memory", "once more with half the micro-batch and equal weights, else advice"),
    Row("13", "a loss or gradient is not finite", "stopped at that step, the last good checkpoint kept"),
    Row("14", "data are empty, or columns, types or rows are bad", "exit 3 with rule and ids, or quarantine; a report"),
    Row("15", "images are missing, cut off, huge, turned, or no images", "counted by kind; no reader dies"),
    Row("16", "ids twice, or test pairs in training", "refused or left out, and counted"),
    Row("17", "text is empty, endless, or holds line ends, markers or other alphabets", "no caption shifts to another"),
    Row("18", "Java is missing or old, or a program of a metric dies", "null with the reason; the gate refuses a null"),
    Row("19", "MLflow is gone at the start, in the middle or at register", "refused at once, or done when it is back"),
    Row("20", "Prefect's server is gone in mid-run", "the stage ends well, and the next run does not repeat it"),
    Row("21", "the DVC remote fails half-way", "tried again; nothing points to what is not there"),
    Row("22", "two runs of the same work at once", "one works, the other waits and has nothing to do"),
    Row(
        "23",
        "a challenger is worse, equal or without scores; no champion, or one of another test set",
        "as the gate says",
    ),
    Row("24", "a run again with nothing changed", "every stage is skipped, no new version"),
    Row("25", "only a parameter of evaluate changed", "evaluate alone runs"),
    Row("26", "a run is resumed with another number of workers", "it goes on; it never starts at 0 without a word"),
    Row("27", "other data, parameters or code under the same name of a run", "another run, by its key"),
    Row("28", "a checkpoint lacks a weight that trained", "refused as it is saved"),
    Row("29", "the clock jumps, or summer time begins", "durations and schedules are unmoved"),
    Row("30", "packages cannot be written, no HOME, a path with spaces, a user without a name", "it runs"),
    Row("31", "a pickle in a checkpoint, paths out of the data, tags in YAML", "none of it is followed or executed"),
    Row("32", "an environment as the lock file makes it", "Prefect's server answers"),
    Row(
        "B1", "parameters or code are edited while a stage runs", "the stage fails, or the edit does not reach the run"
    ),
    Row("B2", "a bit flips in the checkpoint of the second worker", "found; the one before is used"),
    Row("S1", "a run is to be brought back elsewhere", "a fresh clone and the remote are enough"),
    Row("S2", "NaN, noise, another test set or a rollback before the gate", "no champion by mistake"),
    Row("S3", "a run was interrupted", "its report, and so dvc.lock, is that of an undisturbed one"),
    Row("S4", "a person works in the checkout of a flow", "neither disturbs the other"),
    Row("S5", "a server or worker dies", "it comes back, and its log is kept"),
    Row("S6", "data change outside the folders of the run", "they are seen"),
    Row("S7", "Ray is asked for this machine alone", "it listens on loopback and nowhere else"),
    Row("P1", "git's or MLflow's variables name another repository or registry", "the project's own is used"),
    Row("P2", "a proxy is set, and not for loopback alone", "this machine is asked directly, others by the proxy"),
    Row("P3", "TMPDIR is long, or has letters that shells read", "sockets fit, and files lie where it says"),
    Row("P4", "HOME cannot be made or written", "caches go elsewhere; its settings are read"),
    Row("P5", "the checkout's path has spaces, quotes, brackets, & or $", "Ray's workers start"),
    Row("P6", "a checkout was copied or moved with its .venv", "its own code runs, or a line says `make install`"),
    Row("P7", "PYTHONSAFEPATH is set", "a worktree's stage runs the worktree's code"),
    Row("P8", "no network, and a newer time of pyproject.toml", "`make install` needs no index"),
    Row("P9", "core.autocrlf is true", "a checkout and a run's worktree have the commit's bytes"),
    Row("P10", "RAY_ADDRESS names a cluster that is gone", "said in a line, within a minute and once"),
    Row("P11", "Ray or its workers do not start", "one attempt, and where the logs are"),
    Row("P12", "Ray would ask clouds where it runs, and report that nothing is reported", "nobody is asked"),
    Row("P13", "the project is a folder or a submodule of another repository", "refused first, with what to type"),
    Row("P14", "MLflow's store was copied or moved with its checkout", "artifacts here, none of the original's"),
    Row("m1", "three registrations at once", "one version of one run"),
    Row("m2", "register is killed in mid-write", "nothing is left pending"),
    Row("m3", "no GPU is there though asked for", "said before anything starts"),
    Row("m4", "a loss of NaN", "met once, with its step"),
    Row("m5", "a model name that MLflow refuses", "refused before training"),
    Row("m6", "runs of the schedule pile up", "one runs"),
    Row("m7", "a machine of a cluster and RAY_ADDRESS", "its memory and GPUs are not this machine's"),
    Row("m8", "a bit flips in a file whose time is kept, so that DVC calls it current", "it is not registered"),
    Row("m9", "a checkpoint that is to be resumed holds pickles", "none is loaded"),
    Row("T9", "MLflow's store or registered model begins anew, or is put back to a backup", "no version for another"),
    Row(
        "T10",
        "experiment, run, alias, version or scores are deleted on MLflow's page",
        "said before the first step with the remedy; no champion by mistake; registered when mended",
    ),
    Row("T13", "score files with unlike nulls or pairs twice; a guard at its tolerance", "refused; accepted"),
    Row(
        "W1",
        "the worker's machine sleeps, and the server calls its runs crashed",
        "it goes on with what it has in hand",
    ),
    Row("W2", "a worker is killed before a run that it took began", "the run crashes, is told, and keeps no place"),
    Row("W3", "a person pauses or limits something on Prefect's page", "it stays so at `make up`, and is said"),
    Row("W4", "server, worker, MLflow or the flow's process is killed", "each comes back, and each run has an end"),
    Row("W5", "a script that started a server in the background ends", "the server goes on"),
    Row(
        "T5",
        "remotes, stores and git's own settings have relative paths",
        "as in the checkout, and the remote is asked",
    ),
    Row("T12", "a kill leaves dvc.lock or a flow's own file empty or cut short", "never committed; read as if none"),
    Row("T15", "a host of a cluster is cut off, and what trains there lives on", "it ends, and writes nothing more"),
    Row("T14", "the record of decisions loses its branch or its last commits", "fetched, else nothing is decided"),
    Row(
        "T17", "cache objects, clocks, hooks and passwords in addresses", "seen before training; never told to anybody"
    ),
    Row("see", "a person wants to see what ran", "page, links, progress, hours and scores"),
)

NO_TEST_YET: dict[str, str] = {}
"""Rows that nothing shows yet, and why."""
