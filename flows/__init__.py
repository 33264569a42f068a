"""The flows. Importing this package guards the server that Prefect starts for a flow where it knows of none, from pages
of other sites."""

import os

GUARD = "components.serve.same_origin:Guarded"
"""A protocol of uvicorn, for a server that asks for no token."""

os.environ.setdefault("UVICORN_HTTP", GUARD)
