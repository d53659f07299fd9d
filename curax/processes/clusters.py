"""Whether a cluster started this process as one of several."""

import os
from collections.abc import Mapping
from pathlib import Path

DEVICES = ("/dev/accel0", "/dev/vfio/0")  # of a virtual machine with TPUs


def detected(
    env: Mapping[str, str] = os.environ, devices: tuple[str, ...] = DEVICES
) -> bool:
    """Whether `jax.distributed` should start without being told of a coordinator.

        SLURM        started by srun with more than one task
        Open MPI     started by mpirun with more than one process
        Kubernetes   a pod of an indexed job, thus of a JobSet
        TPU          a virtual machine with TPUs; JAX asks its metadata for the others

    Args:
        env: the environment.
        devices: files of which a machine with TPUs has one.
    """
    if "SLURM_STEP_NODELIST" in env:
        return env.get("SLURM_NTASKS", "1") != "1"
    if "OMPI_COMM_WORLD_SIZE" in env:
        return env["OMPI_COMM_WORLD_SIZE"] != "1"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return True
    platforms = env.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms:
        return False
    return any(Path(device).exists() for device in devices)
