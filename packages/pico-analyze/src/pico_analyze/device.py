"""Where the linear algebra is done: on the CPU, or in float64 on a CUDA device. torch is imported on first use."""


class DeviceError(ValueError):
    """A device that cannot be used; the message says what there is."""


def check(name: str) -> None:
    """Raises `DeviceError` where the device, as torch names it (``cpu``, ``cuda``, ``cuda:1``), is not one that can be used."""
    import torch

    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()) or (kind == "cpu" and number):
        raise DeviceError(f"device: {name!r} is not one of cpu, cuda, cuda:<number>; others have no float64")
    if kind == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= there:
            devices = ", ".join(f"cuda:{i}" for i in range(there))
            why = f"torch {torch.__version__} finds no CUDA device here" if not there else f"there are {devices}"
            raise DeviceError(f"device: {name} cannot be used: {why}; leave it out to use the CPU")
