"""Where the time of a profile went, as curves in TensorBoard know it."""

import msgspec

from gpubench.trace.profile import Profile


def shares(profile: Profile) -> dict[str, float]:
    """The breakdown of the lowest rank by tag, as fractions of its wall time; "profile/step_time" is in seconds.

    Tags are "profile/device/compute", "profile/idle/data_loader", "profile/host/python" and so on.
    """
    rank = profile.ranks[0]
    if not rank.wall:
        return {}
    parts: dict[str, int] = {f"host/{part}": time for part, time in rank.host.items()}
    if rank.device:
        device = msgspec.structs.asdict(rank.device)
        parts |= {f"device/{name}": time for name, time in device.items() if name != "wall"}
        parts |= {f"idle/{cause}": time for cause, time in rank.idle.items()}
    found = {f"profile/{tag}": time / rank.wall for tag, time in parts.items()}
    return found | ({"profile/step_time": rank.wall / 1e9 / len(rank.steps)} if rank.steps else {})
