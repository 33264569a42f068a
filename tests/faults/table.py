"""Faults, each with what must then happen. Tests anywhere in `tests/` show a row by the marker
`@pytest.mark.fault("05")`; `make faults` runs them all, and `tests/faults/test_durable.py` sees that no row is without.

Rows 01 to 32 are faults of machines, tools and data; the others were found broken here once, by people who tried.
"""

TEXT = """
01  a Ray worker is killed in the middle of an epoch -> goes on from a checkpoint to the same weights
02  `dvc repro` is killed while a stage runs -> the stage ends too; the next run needs no hand
03  SIGTERM, as a cancelled flow sends it -> a checkpoint in the grace time, and no process is left
04  everything is killed at once: the host is gone -> the next run does the work from what was kept
05  the newest checkpoint is cut short by a loss of power -> the one before is used; a warning names both
06  another dvc command holds DVC's lock as a stage ends -> it is waited for, and the stage is recorded
07  DVC's rwlock is empty or half -> a flow run does not meet it
08  dvc.lock is empty, or has the marks of a merge conflict -> a sentence with git's command, no traceback
09  a bit flips in a cache object or in the checkpoint -> named with both hashes; not scored, not registered
10  the disk is full at a checkpoint, in convert or in push -> what was whole stays; try again, room named
11  fewer GPUs are there than were asked for -> refused within a minute with have and need
12  out of memory -> once more with half the micro-batch and equal weights, else advice
13  a loss or gradient is not finite -> stopped at that step, the last good checkpoint kept
14  data are empty, or columns, types or rows are bad -> exit 3 with rule and ids, or quarantine; a report
15  images are missing, cut off, huge, turned, or no images -> counted by kind; no reader dies
16  ids twice, or test pairs in training -> refused or left out, and counted
17  text is empty, endless, or holds line ends, markers or other alphabets -> no caption shifts to another
18  Java is missing or old, or a program of a metric dies -> null with the reason; the gate refuses a null
19  MLflow is gone at the start, in the middle or at register -> refused at once, or done when it is back
20  Prefect's server is gone in mid-run -> the stage ends well, and the next run does not repeat it
21  the DVC remote fails half-way -> tried again; nothing points to what is not there
22  two runs of the same work at once -> one works, the other waits and has nothing to do
23  a challenger is worse, equal or without scores; no champion, or one of another test set -> as the gate says
24  a run again with nothing changed -> every stage is skipped, no new version
25  only a parameter of evaluate changed -> evaluate alone runs
26  a run is resumed with another number of workers -> it goes on; it never starts at 0 without a word
27  other data, parameters or code under the same name of a run -> another run, by its key
28  a checkpoint lacks a weight that trained -> refused as it is saved
29  the clock jumps, or summer time begins -> durations and schedules are unmoved
30  packages cannot be written, no HOME, a path with spaces, a user without a name -> it runs
31  a pickle in a checkpoint, paths out of the data, tags in YAML -> none of it is followed or executed
32  an environment as the lock file makes it -> Prefect's server answers
B1  parameters or code are edited while a stage runs -> the stage fails, or the edit does not reach the run
B2  a bit flips in the checkpoint of the second worker -> found; the one before is used
S1  a run is to be brought back elsewhere -> a fresh clone and the remote are enough
S2  NaN, noise, another test set or a rollback before the gate -> no champion by mistake
S3  a run was interrupted -> its report, and so dvc.lock, is that of an undisturbed one
S4  a person works in the checkout of a flow -> neither disturbs the other
S5  a server or worker dies -> it comes back, and its log is kept
S6  data change outside the folders of the run -> they are seen
S7  Ray is asked for this machine alone -> it listens on loopback and nowhere else
P1  git's or MLflow's variables name another repository or registry -> the project's own is used
P2  a proxy is set, and not for loopback alone -> this machine is asked directly, others by the proxy
P3  TMPDIR is long, or has letters that shells read -> sockets fit, and files lie where it says
P4  HOME cannot be made or written -> caches go elsewhere; its settings are read
P5  the checkout's path has spaces, quotes, brackets, & or $ -> Ray's workers start
P6  a checkout was copied or moved with its .venv -> its own code runs, or a line says `make install`
P7  PYTHONSAFEPATH is set -> a worktree's stage runs the worktree's code
P8  no network, and a newer time of pyproject.toml -> `make install` needs no index
P9  core.autocrlf is true -> a checkout and a run's worktree have the commit's bytes
P10 RAY_ADDRESS names a cluster that is gone -> said in a line, within a minute and once
P11 Ray or its workers do not start -> one attempt, and where the logs are
P12 Ray would ask clouds where it runs, and report that nothing is reported -> nobody is asked
P13 the project is a folder or a submodule of another repository -> refused first, with what to type
P14 MLflow's store was copied or moved with its checkout -> artifacts here, none of the original's
m1  three registrations at once -> one version of one run
m2  register is killed in mid-write -> nothing is left pending
m3  no GPU is there though asked for -> said before anything starts
m4  a loss of NaN -> met once, with its step
m5  a model name that MLflow refuses -> refused before training
m6  runs of the schedule pile up -> one at a time runs
m7  a machine of a cluster and RAY_ADDRESS -> its memory and GPUs are not this machine's
m8  a bit flips in a file whose time is kept, so that DVC calls it current -> it is not registered
m9  a checkpoint that is to be resumed holds pickles -> none is loaded
T9  MLflow's store or registered model begins anew, or is put back to a backup -> no version for another
T10 experiment, run, alias, version or scores are deleted on MLflow's page -> said before the first step with the
     remedy; no champion by mistake; registered when mended
T13 score files with unlike nulls; a guard at its tolerance -> refused; accepted
W1  the worker's machine sleeps, and the server calls its runs crashed -> it goes on with what it has in hand
W2  a worker is killed before a run that it took began -> the run crashes, is told, and keeps no place
W3  a person pauses or limits something on Prefect's page -> it stays so at `make up`, and is said
W4  server, worker, MLflow or the flow's process is killed -> each comes back, and each run has an end
W5  a script that started a server in the background ends -> the server goes on
T5  remotes, stores and git's own settings have relative paths -> as in the checkout, and the remote is asked
T12 a kill leaves dvc.lock or a flow's own file empty or cut short -> never committed; read as if none
T15 a host of a cluster is cut off, and what trains there lives on -> it ends, and writes nothing more
T14 the record of decisions loses its branch or its last commits -> fetched, else nothing is decided
T17 cache objects, clocks, hooks and passwords in addresses -> seen before training; never told to anybody
see a person wants to see what ran -> page, links, progress, hours and scores
"""

KEYS = [line.split()[0] for line in TEXT.splitlines() if line and line[0] != " "]
"""Of each row, as the marker has it."""
