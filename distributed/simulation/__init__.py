"""The runtime on a manual clock and a scripted network: every schedule can be run again from its seed."""
