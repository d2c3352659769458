"""Every Python process that has this folder on its path is a host of its own for NCCL: see
`tests.gpus`."""

import os

os.environ["NCCL_HOSTID"] = f"{os.uname().nodename}-{os.getpid()}"
