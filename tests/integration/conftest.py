"""No test reaches for the network: the hub's client reads this when it is first imported."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
