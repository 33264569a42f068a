"""Test that messages, logs and alerts contain no password."""

import pytest

from flows import alerts, dvc
from m3diff.provenance.git import GitError, git
from m3diff.records.errors import redact
from m3diff.registry.tracking import TrackingUnavailableError, check_alive

pytestmark = pytest.mark.fault("T17")
SECRET = "hunter2-s3cret"
PLAIN = ("ssh://git@host/x", "s3://bucket/me@x", "mail me@host", "http://host:5000/a:b@c", "file:///a:b@c", "a: b@c")


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"fatal: 'https://me:{SECRET}@host/x.git/' is gone", "fatal: 'https://***@host/x.git/' is gone"),
        (f"https://{SECRET}@host/x", "https://***@host/x"),
        (f"ssh://me:{SECRET}@host:22/dvc", "ssh://***@host:22/dvc"),
        (f"postgresql+asyncpg://me:a@{SECRET}@host/db", "postgresql+asyncpg://***@host/db"),
        (f"http://host/x?a=1&X-Amz-Signature={SECRET}&b=2", "http://host/x?a=1&X-Amz-Signature=***&b=2"),
        (f"http://host/x?access_token={SECRET} gone", "http://host/x?access_token=*** gone"),
        (f"login with {SECRET}-of-the-environment failed", "login with *** failed"),
        ("seven77 or eight888", "seven77 or ***"),
        *((text, text) for text in PLAIN),
    ],
)
def test_a_redacted_address_loses_its_password_and_nothing_else(monkeypatch, text, redacted):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", f"{SECRET}-of-the-environment")
    for name, value in (("SHORT_TOKEN", "a"), ("SEVEN_TOKEN", "seven77"), ("EIGHT_TOKEN", "eight888")):
        monkeypatch.setenv(name, value)
    assert redact(text) == redacted


def test_errors_lines_and_alerts_contain_no_password(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = f"https://me:{SECRET}@127.0.0.1:9"
    with pytest.raises(TrackingUnavailableError) as gone:
        check_alive(address)
    git("init", "--quiet")
    with pytest.raises(GitError) as refused:
        git("fetch", "--quiet", f"{address}/x.git")
    dvc_error = dvc.DvcError.of_command("dvc pull", 1, [f"{address} is gone"])
    texts = [str(gone.value), str(refused.value), str(dvc_error)]
    texts += dvc.readable_lines([f"{address}\n"])
    monkeypatch.setenv(alerts.NOTIFY_VARIABLE, "json://127.0.0.1:9")
    monkeypatch.setattr(alerts, "send", lambda address, title, text: texts.append(text) or True)
    alerts.send_alert(pytest.fail, "key", "title", f"{address} is gone", tmp_path)
    assert len(texts) == 5
    for text in texts:
        assert "127.0.0.1" in text
        assert SECRET not in text
