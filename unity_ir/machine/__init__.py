"""Machines: devices, levels, links; presets as text files; costs of kernels and collectives."""

from unity_ir.machine.device import Device
from unity_ir.machine.links import Level, Link, Protocol, Wire
from unity_ir.machine.load import load
from unity_ir.machine.model import Machine
from unity_ir.machine.parts import part, part_counts, send_seconds
from unity_ir.machine.toml import described, machine_from

__all__ = [
    "Device",
    "Level",
    "Link",
    "Machine",
    "Protocol",
    "Wire",
    "described",
    "load",
    "machine_from",
    "part",
    "part_counts",
    "send_seconds",
]
