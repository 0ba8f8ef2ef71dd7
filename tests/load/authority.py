"""Certificates of the tests' own, and TLS contexts for both ends."""

import ssl
from pathlib import Path

import trustme

from fastload.load.tls import TlsOptions, context


class Authority:
    """A certificate authority of the test's own, and contexts for both ends."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)
        self.folder = folder

    def server(self, *names: str, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        """For a server that says it is `names` (localhost)."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.maximum_version = newest
        self.ca.issue_cert(*(names or ("localhost", "127.0.0.1"))).configure_cert(made)
        return made

    def client_files(self) -> tuple[Path, Path]:
        """A client's certificate and key."""
        own = self.ca.issue_cert("client@example.org")
        cert, key = self.folder / "client.pem", self.folder / "client.key"
        own.cert_chain_pems[0].write_to_path(cert)
        own.private_key_pem.write_to_path(key)
        return cert, key

    def trusting(self) -> ssl.SSLContext:
        """For a client that trusts this authority."""
        return context(TlsOptions(str(self.ca_file)))
