"""Groups of processes that compute together: JAX's runtime, programs that agree, and all-reduce."""
