"""Exit codes of the command line. 0 means success. If a command returns another code, this is a bug."""

USAGE = 2  # arguments or parameters are invalid, or a package is not installed
DATA_REFUSED = 3
GATE_REFUSED = 4
TRY_AGAIN = 75  # a server, a worker, a lock or disk space was not available; EX_TEMPFAIL in sysexits.h
READER_LEFT = 141  # the reader of a pipe, such as `| head`, exited first; shells report 128 + SIGPIPE
