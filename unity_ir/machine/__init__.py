"""Machines: devices, levels, links; presets as text files; what a collective costs."""

from unity_ir.machine.collectives import Level
from unity_ir.machine.device import Device
from unity_ir.machine.load import load
from unity_ir.machine.model import Machine

__all__ = ["Device", "Level", "Machine", "load"]
