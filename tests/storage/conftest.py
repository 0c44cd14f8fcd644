"""The servers that storage plugins are tested against, and its own modules to import: `from servers import request`."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from servers import azurite, gcs, moto, nginx, sshd, webdav, weed  # noqa: E402, F401 - it is found from here on

# collecting what is no test would import it a second time, under another name
collect_ignore = [file.name for file in HERE.glob("*.py") if not file.name.startswith("test_")]

# Read when gcsfs is imported: without it, the first call to an emulator waits a minute for an answer over gRPC.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# Credentials are what a test says, and are asked of no machine's metadata.
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
