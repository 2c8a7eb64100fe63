"""The processes of this machine: starting, watching and ending them, and the files of a run."""
