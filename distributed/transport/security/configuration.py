"""The security policy of this process, from arguments or the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import SameMachine, SecurityPolicy
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.tracing.environment import read
from dflow.tracing.errors import ConfigError

CERTIFICATE_VARIABLES = ("DFLOW_TLS_CERT", "DFLOW_TLS_KEY", "DFLOW_TLS_CA")
SECRET_VARIABLE = "DFLOW_SECRET_FILE"


def choose_security(
    environment: Mapping[str, str], *, certificates: Path | None = None, secret_file: Path | None = None
) -> SecurityPolicy:
    """Return the configured policy; `SameMachine` if none is configured.

    environment   of the process: `CERTIFICATE_VARIABLES` name three files, `SECRET_VARIABLE` one
    certificates  a folder that `dflow certs issue` wrote; this and `secret_file` override the environment
    raises        ConfigError when both kinds are configured, or one incompletely; errors of the policies
    """
    if certificates is not None and secret_file is not None:
        raise ConfigError(f"certificates {certificates} and secret {secret_file} are both given; give one of them")
    if certificates is not None:
        return MutualTls.in_folder(certificates)
    if secret_file is not None:
        return SharedSecret(secret_file)
    files = [read(name, environment) for name in CERTIFICATE_VARIABLES]
    secret = read(SECRET_VARIABLE, environment)
    if any(files) and secret:
        raise ConfigError(f"{SECRET_VARIABLE} and {CERTIFICATE_VARIABLES[0]} are both set; unset one of them")
    if any(files) and not all(files):
        missing = [name for name, file in zip(CERTIFICATE_VARIABLES, files, strict=True) if not file]
        raise ConfigError(
            f"{' and '.join(missing)} is not set, and certificates take {', '.join(CERTIFICATE_VARIABLES)}\n"
            "  `dflow certs issue` prints all three"
        )
    if secret:
        return SharedSecret(Path(secret))
    return MutualTls(*map(Path, files)) if all(files) else SameMachine()
