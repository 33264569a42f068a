"""Define the error that is raised if a service fails.

The class is not defined in `infra/services.py`, because that file also runs as a script and the class would then exist
twice.
"""

from m3diff.records.errors import CodedError


class ServiceError(CodedError, RuntimeError):
    """A service cannot be started or is not running. The message says why and what to do."""
