"""Which peers a listener accepts: policies, certificates, the shared secret, limits on unauthenticated peers."""
