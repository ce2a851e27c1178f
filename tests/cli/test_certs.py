"""``streamoff certs``, and the authority behind it."""

import datetime as dt
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from streamoff.cli import main
from streamoff.errors import UsageError
from streamoff.transports import authority
from streamoff.transports.tls import Identity
from streamoff.types import Address


def load(path: Path) -> x509.Certificate:
    """Read a certificate."""
    return x509.load_pem_x509_certificate(path.read_bytes())


def mode(path: Path) -> int:
    """Who may do what with it."""
    return stat.S_IMODE(path.stat().st_mode)


def days_left(certificate: x509.Certificate) -> int:
    """From now."""
    return (certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)).days


def test_an_authority_and_an_identity_are_made_by_two_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the commands make is private, says for how long, and is what an endpoint can use."""
    place = tmp_path / "authority"
    former = os.umask(0)
    try:
        assert main(["certs", "init", str(place)]) == 0
        said = capsys.readouterr().out
        assert main(["certs", "issue", str(place), "--address", "site-1"]) == 0
        said += capsys.readouterr().out
    finally:
        os.umask(former)
    issued = place / "issued" / "site-1"
    assert {path: mode(path) for path in (place, issued.parent, issued)} == {
        place: 0o700,
        issued.parent: 0o700,
        issued: 0o700,
    }
    assert mode(place / "authority.key") == mode(issued / "key.pem") == 0o600
    ends = [load(place / "authority.pem"), load(issued / "certificate.pem")]
    assert [days_left(end) for end in ends] == [3649, 364]
    for end in ends:
        assert f"{end.not_valid_after_utc:%Y-%m-%d}" in said
    assert sorted(path.name for path in issued.iterdir()) == [
        "authority.pem",
        "certificate.pem",
        "key.pem",
    ]
    Identity.load(issued)


def test_certificates_say_what_they_are_for(tmp_path: Path) -> None:
    """The authority signs identities and nothing below them; an identity signs handshakes on either side, for its address."""
    place = authority.create(tmp_path / "a").directory
    issued = authority.issue(place, Address("site-1.trainer")).directory
    top, end = load(place / "authority.pem"), load(issued / "certificate.pem")
    for one, ca in ((top, True), (end, False)):
        extensions = one.extensions
        basic = extensions.get_extension_for_class(x509.BasicConstraints)
        usage = extensions.get_extension_for_class(x509.KeyUsage)
        assert basic.critical
        assert usage.critical
        assert (basic.value.ca, basic.value.path_length) == (ca, 0 if ca else None)
        assert (usage.value.key_cert_sign, usage.value.digital_signature) == (ca, not ca)
        public = one.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)
        assert public.curve.name == "secp256r1"
        assert one.not_valid_before_utc < dt.datetime.now(dt.UTC) - dt.timedelta(minutes=50)
    names = end.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert uris == ["streamoff:site-1.trainer"]
    extended = end.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(extended) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    end.verify_directly_issued_by(top)
    second = load(
        authority.issue(place, Address("site-2")).directory / "certificate.pem"
    ).serial_number
    assert len({top.serial_number, end.serial_number, second}) == 3


def test_nothing_is_overwritten_unless_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second init or issue is refused and changes nothing; with --force there are new keys."""
    place = str(tmp_path / "authority")
    commands = (
        (["certs", "init", place], tmp_path / "authority" / "authority.key"),
        (
            ["certs", "issue", place, "--address", "site-1"],
            tmp_path / "authority" / "issued" / "site-1" / "key.pem",
        ),
    )
    for command, key in commands:
        assert main(command) == 0
        first = key.read_bytes()
        assert main(command) == 2
        assert "--force" in capsys.readouterr().err
        assert key.read_bytes() == first
        assert main([*command, "--force"]) == 0
        assert key.read_bytes() != first
        assert mode(key) == 0o600
    assert list((tmp_path / "authority").rglob(".*")) == []


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Neither with nor without --force is a directory taken over that holds other files."""
    place = tmp_path / "home"
    place.mkdir(mode=0o755)
    (place / "thesis.txt").write_text("years of work", encoding="utf-8")
    for force in (False, True):
        with pytest.raises(UsageError):
            authority.create(place, force=force)
    assert mode(place) == 0o755
    assert [path.name for path in place.iterdir()] == ["thesis.txt"]


def test_what_cannot_be_issued_is_refused_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No authority, no address, impossible days, an authority whose time is over: exit code 2 and the reason."""
    place = tmp_path / "authority"
    issue = ["certs", "issue", str(place), "--address"]
    for command, reason in (
        ([*issue, "site-1"], "there is no authority here"),
        (["certs", "init", str(place), "--days", "0"], "1 to 36500"),
        (["certs", "init", str(place), "--days", "1000000"], "1 to 36500"),
    ):
        assert main(command) == 2
        assert reason in capsys.readouterr().err
        assert not place.exists()
    authority.create(place)
    for address in ("", "site 1", "../site", "site-1/..", "a" * 300):
        assert main([*issue, address]) == 2
        assert "not an address" in capsys.readouterr().err
    assert not (place / "issued").exists()
    (place / "authority.key").write_text("nonsense", encoding="utf-8")
    assert main([*issue, "site-1"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    long_ago = dt.datetime.now(dt.UTC) - dt.timedelta(days=100)
    old = authority.create(tmp_path / "old", days=10, now=long_ago).directory
    with pytest.raises(UsageError, match="time is over"):
        authority.issue(old, Address("site-1"))


def test_an_identity_ends_with_its_authority(tmp_path: Path) -> None:
    """However long an identity is asked for, it is not valid longer than the authority."""
    place = authority.create(tmp_path / "a", days=30).directory
    made = authority.issue(place, Address("site-1"), days=400)
    assert made.until == load(place / "authority.pem").not_valid_after_utc


def test_a_long_address_is_whole_where_it_counts(tmp_path: Path) -> None:
    """An address of 255 characters is in the alternative name to its last character."""
    address = Address(".".join(["a" * 63] * 4))
    place = authority.create(tmp_path / "a").directory
    end = load(authority.issue(place, address).directory / "certificate.pem")
    names = end.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert uris == [f"streamoff:{address}"]


def test_the_package_that_is_missing_is_named() -> None:
    """Without the package, the command says which one and how to get it; help works, and torch is not loaded."""
    script = """
        import sys
        sys.modules["cryptography"] = None
        from streamoff.cli import main
        try:
            main(["certs", "--help"])
        except SystemExit as end:
            assert end.code == 0
        code = main(["certs", "init", "/nowhere"])
        assert "torch" not in sys.modules
        sys.exit(code)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 2, done.stderr
    assert "needs the package 'cryptography'" in done.stderr
    assert "pip install 'streamoff[certs]'" in done.stderr
