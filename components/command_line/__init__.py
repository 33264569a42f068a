"""The command line: one module per command, with its arguments, its help and the function that it runs.

All commands are listed in `COMMANDS` in `m3diff.__main__`. The other modules are `command` (classes), `arguments`
(shared arguments), `parser` (argparse, help, remedies), `distribution` (checkout or wheel), `report_lines` and
`exit_codes`.

All modules here are fast to import, so the help appears immediately. Commands import their libraries when they run.
"""
