"""Machines: devices, levels, links; presets as text files; what a collective costs."""

from unity_ir.machine.load import load
from unity_ir.machine.model import Device, Level, Machine

__all__ = ["Device", "Level", "Machine", "load"]
