"""TLS as the user wants it: which certificates are trusted, and who we say we are.

The supervisor makes a context to find mistakes before anything runs and to ask its questions; the measurer makes its
own from the same options. Only paths travel between them.
"""

import re
import ssl
from dataclasses import dataclass

from fastload.errors import PlanError


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Paths of PEM files. `ca_file` replaces the system's authorities; `insecure` trusts anybody."""

    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None  # None: in the same file as the certificate
    insecure: bool = False


def context(options: TlsOptions) -> ssl.SSLContext:
    """A client's context for HTTP/1.1. Raises PlanError that names the flag whose file is no good."""
    try:
        made = ssl.create_default_context(cafile=options.ca_file)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"--ca-file {options.ca_file}: {_file_fault(error)}; give a PEM file of certificates"
        ) from None
    if options.insecure:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    made.set_alpn_protocols(["http/1.1"])
    if options.client_cert is not None:
        _load_own(made, options.client_cert, options.client_key)
    return made


def _load_own(made: ssl.SSLContext, cert: str, key: str | None) -> None:
    flags = f"--client-cert {cert}" if key is None else f"--client-cert {cert} --client-key {key}"

    def no_password() -> str:
        raise PlanError(f"{flags}: the private key is encrypted; give one without a password")

    try:
        made.load_cert_chain(cert, key, no_password)
    except (OSError, ValueError) as error:
        where = " (it must hold the key too, or --client-key name its file)" if key is None else ""
        raise PlanError(f"{flags}: {_file_fault(error)}; give PEM files that belong together{where}") from None


def _file_fault(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        said = {
            "no certificate or crl found": "holds no certificate",
            "key values mismatch": "the key is not that of the certificate",
            "pem lib": "is not in PEM form, or lacks a part",
        }
        return said.get(reason(error), f"cannot be used ({reason(error)})")
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def fault(error: BaseException) -> str | None:
    """What a failed handshake says, in a few words, from the exception or what it was raised from; None when TLS is
    not to blame."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return f"the server's certificate is not trusted ({seen.verify_message})"
        if isinstance(seen, ssl.CertificateError):
            return f"the server's certificate is not trusted ({seen})"
        if isinstance(seen, ssl.SSLError):
            if seen.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNEXPECTED_MESSAGE"):
                return "the server does not speak TLS"
            return f"TLS: {reason(seen)}"
        seen = seen.__cause__ or seen.__context__
    return None


def reason(error: ssl.SSLError) -> str:
    """OpenSSL's reason as words, without the place in Python's source: `tlsv13 alert certificate required`."""
    words = error.reason or re.sub(r"^\[\w+\] | \(_ssl\.c:\d+\)$", "", str(error))
    return words.lower().replace("_", " ")
