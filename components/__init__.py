"""m3diff's stages. Importing this package switches every tool's telemetry off, keeps a Ray of this machine's own off
the network, and sees to paths and environment (`place.py`), before any tool is imported."""

import os

from components.place import settle

PRIVACY = {
    "DO_NOT_TRACK": "true",
    "DVC_NO_ANALYTICS": "1",
    "DVC_STUDIO_OFFLINE": "true",
    "ITERATIVE_DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "GX_ANALYTICS_ENABLED": "false",
}

for _name, _value in PRIVACY.items():
    os.environ.setdefault(_name, _value)

if not os.environ.get("RAY_ADDRESS"):  # as on those systems: Ray then keeps to 127.0.0.1, where it is asked to
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

settle()
