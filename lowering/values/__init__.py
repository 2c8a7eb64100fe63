"""Values of variables and steps on the devices of this process."""
