"""Commands that need no cluster: a new project, a check of this machine, completion in the shell."""
