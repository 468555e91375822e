"""Scalars of TensorBoard event files, by the protocol buffers that tensorboardX ships."""

import pathlib
import struct

from tensorboardX.proto.event_pb2 import Event


def scalars(folder: str) -> dict[str, list[tuple[int, float]]]:
    """tag -> [(step, value)], from records of (length, crc, event, crc)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(pathlib.Path(folder).iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            data = data[16 + length :]
    return found
