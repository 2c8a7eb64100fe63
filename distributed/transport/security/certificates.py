"""Creation of keys and certificates in PEM.

Why P-256: every TLS library supports it, even in FIPS mode. Certificates state their purpose as strictly as Python's
`ssl` can check: the authority may only sign the certificates of tasks, and a task may be both client and server.

This needs the package `cryptography`, from the extra `security`; it is imported when a certificate is made.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from dflow.distributed.transport.security.identity import Identity
from dflow.tracing.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

#: A certificate is valid from this time before its creation, since clocks differ.
SKEW = timedelta(hours=1)
#: All uses of a key, in the words of `x509.KeyUsage`.
_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)
_HOST = re.compile(r"(?!.*\.\.)[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, repr=False)
class KeyPair:
    """A certificate and its private key, both PEM; no `repr` shows the key."""

    certificate: bytes
    key: bytes


def make_authority(name: str, now: datetime, valid: timedelta) -> KeyPair:
    """Create an authority, which signs the certificates of tasks; raises ConfigError without `cryptography`."""
    return _make(name, now, valid, is_authority=True)


def issue_certificate(
    authority: KeyPair, identities: Sequence[Identity], hosts: Sequence[str], now: datetime, valid: timedelta
) -> KeyPair:
    """Create a certificate for tasks, signed by `authority`.

    `hosts`  DNS names and IP addresses that may show it; empty for any
    raises   ValueError for an invalid host, or if the authority expires earlier; ConfigError without `cryptography`
    """
    _require_cryptography()
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = load_pem_private_key(authority.key, None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is not of the kind that `dflow certs init` makes")
    if now + valid > issuer.not_valid_after_utc:
        raise ValueError(
            f"the authority ends on {issuer.not_valid_after_utc:%Y-%m-%d}, before a certificate of {valid.days} days "
            "would; ask for fewer days, or make a new authority"
        )
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri) for identity in identities]
    names += map(_general_name, hosts)
    return _make(str(identities[0]), now, valid, names, (issuer.subject, issuer_key))


def self_signed(now: datetime, valid: timedelta) -> KeyPair:
    """Create a self-signed certificate; raises ConfigError without `cryptography`."""
    return _make("dflow", now, valid)


def _require_cryptography() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError("making keys needs the package `cryptography`", "pip install 'dflow[security]'")


def _make(
    name: str,
    now: datetime,
    valid: timedelta,
    names: Sequence[x509.GeneralName] = (),
    issuer: tuple[x509.Name, EllipticCurvePrivateKey] | None = None,
    *,
    is_authority: bool = False,
) -> KeyPair:
    """Create a key and its certificate, for tasks unless `is_authority`, signed by `issuer` or with its own key."""
    _require_cryptography()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    issued_by, signer = issuer or (subject, key)
    builder = x509.CertificateBuilder(issued_by, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - SKEW).not_valid_after(now + valid)
    usages = ("key_cert_sign", "crl_sign") if is_authority else ("digital_signature",)
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), True),
        (x509.KeyUsage(**dict.fromkeys(_USAGES, False) | dict.fromkeys(usages, True)), True),
    ]
    if not is_authority:
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        extensions.append((x509.ExtendedKeyUsage(purposes), False))
    if issuer is not None:
        extensions.append((x509.SubjectAlternativeName(names), False))
        extensions.append((x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False))
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    pem = builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)
    return KeyPair(pem, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise ValueError(f"{host!r} is no host; give a DNS name in ASCII without `*`, or an IP address")
    return x509.DNSName(host.lower())
