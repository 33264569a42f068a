"""Java, which METEOR, SPICE and the PTB tokenizer are written in: is there one, and does it start?"""

import re
import shutil
import subprocess

from m3diff.records.errors import DataError

OLDEST_JAVA = 8
REMEDY = (
    "install a Java runtime, 8 or newer (17 is tested), and put it on PATH: "
    "`apt-get install openjdk-17-jre-headless` on Debian and Ubuntu, `brew install openjdk@17` on macOS"
)


class JavaMissing(DataError):
    """No usable Java; the text names the remedy."""


def require_java() -> int:
    """The major version of the Java on PATH.

    Raises:
        JavaMissing: there is none, it does not start, or it is older than Java 8.
    """
    java = shutil.which("java")
    if java is None:
        raise JavaMissing(f"java: not found on PATH; the caption scores and their tokenizer need it: {REMEDY}")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except subprocess.CalledProcessError as error:
        said = " / ".join(error.stderr.strip().splitlines()[-3:]) or error
        raise JavaMissing(f"{java}: does not start ({said}); {REMEDY}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise JavaMissing(f"{java}: does not start ({error}); {REMEDY}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', answer)
    if not found or int(found[1]) < OLDEST_JAVA:
        raise JavaMissing(f"{java}: version not understood or too old ({answer.splitlines()[:1]}); {REMEDY}")
    return int(found[1])
