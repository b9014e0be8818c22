use std::convert::Infallible;
use std::sync::Mutex;

use proptest::prelude::*;
use quinn::{Connection, ConnectionError};
use rustls_pki_types::UnixTime;

use super::shell::granted;
use super::*;
use crate::identity::tests::{DAY, authority, host, member, peer};
use crate::identity::{Authority, Identity, IdentityError, Name, Role};
use crate::members::{Member, Members, SignedMembers};
use crate::tls::{ENROL_SERVER_NAME, enrol_client_config, enrol_server_config};

const PRESET: &str = "a preset code with 31 letters, 7 x 1";
const EXPORTER: Exporter = [5; 32];

fn name(name: &str) -> Name {
    name.parse().unwrap()
}

fn preset() -> Code {
    Code::preset(&PRESET.replace(',', "")).unwrap()
}

fn printed(key: &Key) -> Code {
    Code::generate(&key.fingerprint()).unwrap()
}

/// A grant that a worker with this key would take, before it is encoded.
fn grant(authority: &Authority, key: &Key) -> Grant {
    let head = member(&host(authority, Role::Head, "desk"));
    let certificate =
        authority.issue_now(key.public(), &peer(authority, Role::Worker, "rig2"), UnixTime::now()).unwrap();
    Grant {
        name: name("rig2"),
        authority: authority.certificate().der().clone(),
        certificate: certificate.der().clone(),
        members: SignedMembers::sign(&Members::founding(authority.cluster(), head), authority).unwrap(),
    }
}

// The code.

#[test]
fn a_code_survives_being_typed() {
    let key = Key::generate().unwrap();
    let code = printed(&key);
    let text = code.reveal();
    assert_eq!((text.len(), text.split('-').count()), (44, 9));
    assert!(code.is_for(&key.fingerprint()) && !code.is_preset());
    assert!(!code.is_for(&Key::generate().unwrap().fingerprint()));
    assert!(text.replace('-', "").starts_with(&key.fingerprint().to_string()));
    let misread = text.replace('0', "O").replace('1', "l");
    for typed in [text.to_lowercase(), text.replace('-', ""), text.replace('-', " "), format!(" {text}\n"), misread] {
        assert_eq!(typed.parse::<Code>().as_ref(), Ok(&code), "{typed}");
    }
    assert_eq!(Code::preset(&text), Err(CodeError::Printed));
    assert!(!format!("{code:?}{:?}", code.secret(&key.fingerprint())).contains(&text[..4]));
}

#[test]
fn a_typing_error_makes_no_printed_code() {
    let code = printed(&Key::generate().unwrap()).reveal().replace('-', "");
    let is_printed = |at: &usize| {
        let mut typed = code.clone().into_bytes();
        typed[*at] = if typed[*at] == b'Z' { b'Y' } else { b'Z' };
        String::from_utf8(typed).unwrap().parse::<Code>().is_ok_and(|code| !code.is_preset())
    };
    // One in a million is missed, so that two of 36 are once in a thousand million runs.
    assert!((0..code.len()).filter(is_printed).count() < 2);
    assert_eq!(code[1..].parse::<Code>().map(|code| code.is_preset()), Ok(true));
    assert_eq!(code[20..].parse::<Code>(), Err(CodeError::Short { found: 16 }));
}

#[test]
fn preset_codes_are_long_and_no_pattern() {
    let code = preset();
    assert!(code.is_preset() && code.is_for(&Key::generate().unwrap().fingerprint()));
    assert_eq!(Code::preset(&code.reveal().to_lowercase()).as_ref(), Ok(&code));
    assert_eq!(Code::preset("6F2K-9Q3M"), Err(CodeError::Short { found: 8 }));
    assert_eq!(Code::preset(&"ab".repeat(20)), Err(CodeError::Pattern { found: 2 }));
    assert_eq!(Code::preset(&"abcdefghij".repeat(26)), Err(CodeError::Long));
    assert!(matches!(Code::preset("abcdefghij/klmnopqrst"), Err(CodeError::Character { .. })));
    assert!(Code::preset("0123456789abcdef0123456789abcdef").unwrap().is_preset(), "32 of hex are no printed code");
}

#[test]
fn a_secret_is_of_one_code_and_one_key() {
    let keys = [Key::generate().unwrap().fingerprint(), Key::generate().unwrap().fingerprint()];
    let codes = [Code::generate(&keys[0]).unwrap(), Code::generate(&keys[0]).unwrap(), preset()];
    let secrets: std::collections::BTreeSet<_> =
        codes.iter().flat_map(|code| keys.map(|key| code.secret(&key).0)).collect();
    assert_eq!(secrets.len(), 6);
}

// The messages.

#[test]
fn messages_survive_the_wire_and_no_bit_can_be_changed() {
    let (authority, key) = (authority(), Key::generate().unwrap());
    let secret = printed(&key).secret(&key.fingerprint());
    for (is_preset, name) in [(false, None), (true, Some(name(&"x".repeat(40))))] {
        let offer = Offer { is_preset, name };
        let bytes = offer.encode(&secret, &EXPORTER);
        assert_eq!(Offer::decode(&bytes, &secret, &EXPORTER), Ok(offer));
        for bit in 0..8 * OFFER_BYTES {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Offer::decode(&changed, &secret, &EXPORTER), Err(MessageError::Proof));
        }
    }
    let grant = grant(&authority, &key);
    let bytes = grant.encode(&secret, &EXPORTER).unwrap();
    assert!(Grant::is_proved(&bytes, &secret, &EXPORTER));
    assert_eq!(Grant::decode(&bytes), Ok(grant));
    for bit in 0..8 * GRANT_BYTES {
        let mut changed = bytes;
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(!Grant::is_proved(&changed, &secret, &EXPORTER), "bit {bit}");
    }
}

#[test]
fn proofs_are_of_one_code_one_connection_and_one_direction() {
    let key = Key::generate().unwrap();
    let [secret, other] = [0, 1].map(|_| printed(&key).secret(&key.fingerprint()));
    let offer = Offer { is_preset: false, name: None }.encode(&secret, &EXPORTER);
    assert!(Offer::decode(&offer, &secret, &EXPORTER).is_ok());
    assert_eq!(Offer::decode(&offer, &other, &EXPORTER), Err(MessageError::Proof));
    assert_eq!(Offer::decode(&offer, &secret, &[6; 32]), Err(MessageError::Proof));
    // An offer sent back, with zeros behind it, is no grant.
    let mut back = [0; GRANT_BYTES];
    back[..OFFER_BYTES].copy_from_slice(&offer);
    assert!(!Grant::is_proved(&back, &secret, &EXPORTER));
    // Nor would it be if both had one length.
    let [offer, grant] = [message::OFFER, message::GRANT].map(|label| message::proof(label, &[], &secret, &EXPORTER));
    assert_ne!(offer, grant);
}

#[test]
fn what_does_not_fit_a_grant_is_refused() {
    let (authority, key) = (authority(), Key::generate().unwrap());
    let secret = printed(&key).secret(&key.fingerprint());
    let mut long = grant(&authority, &key);
    assert!(long.authority.len() < 512 && long.certificate.len() < 512, "there is room to grow");
    for bytes in [3500, 70_000] {
        long.members = SignedMembers::from_bytes(vec![1; bytes]).unwrap();
        assert_eq!(long.encode(&secret, &EXPORTER), Err(MessageError::Long));
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), at in 0..GRANT_BYTES) {
        let mut grant = [0; GRANT_BYTES];
        let end = GRANT_BYTES.min(at + bytes.len());
        grant[at..end].copy_from_slice(&bytes[..end - at]);
        let _ = Grant::decode(&grant);
        grant[32] = 1;
        let _ = Grant::decode(&grant);
        let offer = std::array::from_fn(|i| grant[i]);
        prop_assert_eq!(Offer::decode(&offer, &SECRET, &EXPORTER), Err(MessageError::Proof));
    }

    #[test]
    fn any_proved_bytes_are_an_offer_or_an_error(bytes in prop::collection::vec(any::<u8>(), OFFER_BYTES - 32)) {
        let offer = message::proved_offer(&bytes, &SECRET, &EXPORTER);
        if let Ok(decoded) = Offer::decode(&offer, &SECRET, &EXPORTER) {
            prop_assert_eq!(decoded.encode(&SECRET, &EXPORTER), offer);
        }
    }

    #[test]
    fn broken_grants_are_read_or_refused(at: prop::sample::Index, byte: u8) {
        let mut grant = EXAMPLE.with(|(grant, _)| *grant);
        grant[32 + at.index(1500)] = byte;
        if let Ok(grant) = Grant::decode(&grant) {
            let _ = EXAMPLE.with(|(_, key)| granted(&grant, key, UnixTime::now()));
        }
    }

    #[test]
    fn any_text_is_a_code_or_an_error(text: String) {
        let _ = text.parse::<Code>();
    }
}

const SECRET: Secret = Secret([3; 32]);

thread_local! {
    static EXAMPLE: ([u8; GRANT_BYTES], Key) = {
        let key = Key::generate().unwrap();
        (grant(&authority(), &key).encode(&SECRET, &EXPORTER).unwrap(), key)
    };
}

// When a code is valid.

/// An open enrolment, a grant that it would take, and one with a wrong proof.
fn open(now: Instant) -> (Enrolment, [u8; GRANT_BYTES], [u8; GRANT_BYTES]) {
    let key = Key::generate().unwrap();
    let code = printed(&key);
    let right = grant(&authority(), &key).encode(&code.secret(&key.fingerprint()), &EXPORTER).unwrap();
    let mut wrong = right;
    wrong[0] ^= 1;
    (Enrolment::open(&code, &key, now), right, wrong)
}

fn after(now: Instant, ms: u64) -> Instant {
    now + Duration::from_millis(ms)
}

#[test]
fn a_code_is_used_once() {
    let now = Instant::now();
    let (mut enrolment, right, _) = open(now);
    assert!(enrolment.judge(&right, &[6; 32], now).is_err(), "of another connection");
    assert!(enrolment.judge(&right, &EXPORTER, after(now, 1000)).is_ok());
    assert_eq!(enrolment.check(after(now, 1000)), Err(Shut::Used));
    assert_eq!(enrolment.judge(&right, &EXPORTER, after(now, 1001)), Err(Judged::Shut(Shut::Used)));
}

#[test]
fn a_code_that_proves_nonsense_is_used_up_too() {
    let now = Instant::now();
    let key = Key::generate().unwrap();
    let code = printed(&key);
    let mut enrolment = Enrolment::open(&code, &key, now);
    let nonsense = message::proved_grant(&[9; 100], &code.secret(&key.fingerprint()), &EXPORTER);
    let judged = enrolment.judge(&nonsense, &EXPORTER, now);
    assert_eq!(judged, Err(Judged::Message(MessageError::Version { found: 9 })));
    assert_eq!(enrolment.check(now), Err(Shut::Used));
}

#[test]
fn a_code_expires() {
    let now = Instant::now();
    let (mut enrolment, right, _) = open(now);
    assert_eq!(enrolment.expires(), after(now, 600_000));
    assert_eq!(enrolment.check(after(now, 599_999)), Ok(()));
    assert_eq!(enrolment.check(after(now, 600_000)), Err(Shut::Expired));
    assert_eq!(enrolment.judge(&right, &EXPORTER, after(now, 600_000)), Err(Judged::Shut(Shut::Expired)));
}

#[test]
fn guesses_are_few_and_slow() {
    let now = Instant::now();
    let (mut enrolment, right, wrong) = open(now);
    for guess in 0..u64::from(WRONG_PROOFS_MAX) {
        let judged = enrolment.judge(&wrong, &EXPORTER, after(now, 1000 * guess));
        assert_eq!(judged, Err(Judged::WrongProof { left: WRONG_PROOFS_MAX - 1 - guess as u32 }));
        let soon = enrolment.judge(&right, &EXPORTER, after(now, 1000 * guess + 999));
        let until = after(now, 1000 * guess + 1000);
        let expected = if guess < 4 { Judged::TooSoon { until } } else { Judged::Shut(Shut::Guessed) };
        assert_eq!(soon, Err(expected), "what is right comes too soon as well, and costs no guess");
    }
    assert_eq!(enrolment.check(after(now, 60_000)), Err(Shut::Guessed));
}

// What a worker takes.

#[test]
fn a_worker_takes_no_certificate_but_its_own() {
    let (mine, other, key) = (authority(), authority(), Key::generate().unwrap());
    let good = grant(&mine, &key);
    let now = UnixTime::now();
    let refused = |grant: Grant| granted(&grant, &key, now).unwrap_err();
    assert_eq!(granted(&good, &key, now).unwrap().name(), &peer(&mine, Role::Worker, "rig2"));

    let for_other_key = grant(&mine, &Key::generate().unwrap()).certificate;
    let found = refused(Grant { certificate: for_other_key, ..good.clone() });
    assert!(matches!(found, AnswerError::Identity(IdentityError::OtherKey)), "{found}");
    let as_head = mine.issue_now(key.public(), &peer(&mine, Role::Head, "rig2"), now).unwrap().der().clone();
    let found = refused(Grant { certificate: as_head, ..good.clone() });
    assert!(matches!(found, AnswerError::Identity(IdentityError::OtherName { .. })), "{found}");
    let found = refused(Grant { name: name("rig3"), ..good.clone() });
    assert!(matches!(found, AnswerError::Identity(IdentityError::OtherName { .. })), "{found}");
    let found = refused(Grant { authority: other.certificate().der().clone(), ..good.clone() });
    assert!(matches!(found, AnswerError::Identity(IdentityError::OtherName { .. })), "{found}");
    let found = refused(Grant { members: grant(&other, &key).members, ..good.clone() });
    assert!(matches!(found, AnswerError::Members(_)), "{found}");
    let later = UnixTime::since_unix_epoch(Duration::from_secs(now.as_secs() + 91 * DAY));
    assert!(matches!(granted(&good, &key, later), Err(AnswerError::Identity(IdentityError::Expired { .. }))));
}

// Both ends, over QUIC.

struct Scene {
    authority: Authority,
    head: Member,
    key: Key,
    code: Code,
    enrolment: Mutex<Enrolment>,
}

impl Scene {
    fn new(code: impl FnOnce(&Key) -> Code) -> Scene {
        let authority = authority();
        let head = member(&host(&authority, Role::Head, "desk"));
        let key = Key::generate().unwrap();
        let code = code(&key);
        let enrolment = Mutex::new(Enrolment::open(&code, &key, Instant::now()));
        Scene { authority, head, key, code, enrolment }
    }

    async fn connect(&self) -> crate::tls::tests::Pair {
        connect(&self.key).await
    }

    async fn ask(&self, connection: &Connection, code: &Code) -> Result<crate::identity::HostCertificate, AskError> {
        ask(connection, code, &self.authority, &self.head, |host: &Host| {
            Ok::<_, Infallible>(host.name.clone().unwrap_or_else(|| name("nameless")))
        })
        .await
    }

    async fn answer(&self, connection: &Connection) -> Result<Identity, AnswerError> {
        let keep = |_: &Identity, _: &SignedMembers| Ok::<_, Infallible>(());
        answer(connection, &self.enrolment, &self.key, Some(&name("rig2")), keep).await
    }

    /// Both ends of an enrolment in which the head was given `code`.
    async fn enrol(
        &self,
        code: &Code,
    ) -> (Result<crate::identity::HostCertificate, AskError>, Result<Identity, AnswerError>) {
        let pair = self.connect().await;
        tokio::join!(self.ask(&pair.dialler, code), self.answer(&pair.listener))
    }

    fn shut(&self) -> Result<(), Shut> {
        self.enrolment.lock().unwrap().check(Instant::now())
    }
}

async fn connect(key: &Key) -> crate::tls::tests::Pair {
    let (server, client) = (enrol_server_config(key).unwrap(), enrol_client_config().unwrap());
    crate::tls::tests::connect(server, client, ENROL_SERVER_NAME).await.unwrap()
}

#[tokio::test]
async fn the_right_code_makes_a_member_once() {
    for code in [printed as fn(&Key) -> Code, |_| preset()] {
        let scene = Scene::new(code);
        let (asked, answered) = scene.enrol(&scene.code).await;
        let (certificate, identity) = (asked.unwrap(), answered.unwrap());
        assert_eq!(certificate, *identity.certificate());
        assert_eq!(*identity.name(), peer(&scene.authority, Role::Worker, "rig2"));
        assert_eq!(identity.authority(), scene.authority.certificate());
        assert_eq!(identity.fingerprint(), scene.key.fingerprint());

        let (asked, answered) = scene.enrol(&scene.code).await;
        assert!(matches!(asked, Err(AskError::Closed { .. })), "{asked:?}");
        assert!(matches!(answered, Err(AnswerError::Shut(Shut::Used))), "{answered:?}");
    }
}

#[tokio::test]
async fn a_head_with_a_wrong_code_signs_nothing() {
    let scene = Scene::new(printed);
    let asked = async |code: &Code| {
        let pair = scene.connect().await;
        let enlist = |_: &Host| -> Result<Name, Infallible> { panic!("a worker without the code is listed") };
        let asking = ask(&pair.dialler, code, &scene.authority, &scene.head, enlist);
        tokio::join!(asking, scene.answer(&pair.listener))
    };
    // For this key, with another secret.
    let (wrong, answered) = asked(&printed(&scene.key)).await;
    assert!(matches!(wrong, Err(AskError::WrongCode)), "{wrong:?}");
    assert!(matches!(answered, Err(AnswerError::Gone)), "{answered:?}");
    let (other, _) = asked(&printed(&Key::generate().unwrap())).await;
    assert!(matches!(other, Err(AskError::OtherKey { found }) if found == scene.key.fingerprint()), "{other:?}");
    let (preset, _) = asked(&preset()).await;
    assert!(matches!(preset, Err(AskError::WrongCode)), "{preset:?}");
    assert_eq!(scene.shut(), Ok(()), "no guess was made");
    assert!(scene.enrol(&scene.code).await.1.is_ok());
}

#[tokio::test]
async fn a_dialler_that_guesses_is_counted() {
    let scene = Scene::new(printed);
    let guess = async |bytes: usize| {
        let pair = scene.connect().await;
        let dialling = async {
            let (mut send, mut receive) = pair.dialler.accept_bi().await.unwrap();
            assert_eq!(receive.read_to_end(10_000).await.unwrap().len(), OFFER_BYTES);
            send.write_all(&vec![0; bytes]).await.unwrap();
            send.finish().unwrap();
            pair.dialler.closed().await
        };
        tokio::join!(dialling, scene.answer(&pair.listener))
    };
    for bytes in [0, GRANT_BYTES - 1, GRANT_BYTES + 1] {
        let (_, answered) = guess(bytes).await;
        assert!(matches!(answered, Err(AnswerError::Length { .. })), "{answered:?}");
    }
    let (closed, answered) = guess(GRANT_BYTES).await;
    assert!(matches!(answered, Err(AnswerError::WrongCode { left: 4 })), "{answered:?}");
    assert!(matches!(closed, ConnectionError::ApplicationClosed(close) if close.reason == "wrong code"));
    // The next is looked at a second later, so that a head is not turned away for a stranger's guess.
    let guessed = Instant::now();
    let (asked, _) = scene.enrol(&scene.code).await;
    assert!(asked.is_ok() && guessed.elapsed() > WRONG_PROOF_PAUSE / 2, "{asked:?}");
}

/// Hands one message on.
async fn relay(mut from: quinn::RecvStream, mut to: quinn::SendStream) {
    let message = from.read_to_end(GRANT_BYTES).await.unwrap();
    to.write_all(&message).await.unwrap();
    to.finish().unwrap();
}

#[tokio::test]
async fn someone_in_between_gets_nothing() {
    let scene = Scene::new(|_| preset());
    let between = Key::generate().unwrap();
    let (to_head, to_worker) = (connect(&between).await, scene.connect().await);
    let exporters = [&to_head.dialler, &to_head.listener, &to_worker.dialler].map(|connection| {
        let mut exporter = [0; 32];
        connection.export_keying_material(&mut exporter, message::EXPORTER_LABEL, &[]).unwrap();
        exporter
    });
    assert!(exporters[0] == exporters[1] && exporters[0] != exporters[2]);
    let relaying = async {
        let (_send, offer) = to_worker.dialler.accept_bi().await.unwrap();
        relay(offer, to_head.listener.open_bi().await.unwrap().0).await;
        to_head.listener.closed().await;
        to_worker.dialler.close(0u32.into(), b"");
    };
    let asking = scene.ask(&to_head.dialler, &scene.code);
    let (asked, answered, ()) = tokio::join!(asking, scene.answer(&to_worker.listener), relaying);
    assert!(matches!(asked, Err(AskError::WrongCode)), "{asked:?}");
    assert!(matches!(answered, Err(AnswerError::Gone)), "{answered:?}");

    // With a printed code it is not even asked: its key is another.
    let scene = Scene::new(printed);
    let to_head = connect(&between).await;
    let asked = scene.ask(&to_head.dialler, &scene.code).await;
    assert!(matches!(asked, Err(AskError::OtherKey { found }) if found == between.fingerprint()), "{asked:?}");
}

#[tokio::test]
async fn what_cannot_be_stored_or_listed_is_said() {
    let scene = Scene::new(printed);
    let pair = scene.connect().await;
    let enlist = |_: &Host| Err::<Name, _>("rig2 is taken");
    let asking = ask(&pair.dialler, &scene.code, &scene.authority, &scene.head, enlist);
    let (asked, answered) = tokio::join!(asking, scene.answer(&pair.listener));
    assert!(asked.unwrap_err().to_string().contains("rig2 is taken"));
    assert!(matches!(answered, Err(AnswerError::Gone)));
    assert_eq!(scene.shut(), Ok(()));

    let pair = scene.connect().await;
    let keep = |_: &Identity, _: &SignedMembers| Err::<(), _>("disk is full");
    let answering = answer(&pair.listener, &scene.enrolment, &scene.key, None, keep);
    let (asked, answered) = tokio::join!(scene.ask(&pair.dialler, &scene.code), answering);
    let asked = asked.unwrap_err();
    assert!(matches!(asked, AskError::Refused { .. }) && asked.to_string().contains("could not store"), "{asked}");
    assert!(answered.unwrap_err().to_string().contains("disk is full"));

    // A worker that vanishes with its certificate.
    let scene = Scene::new(printed);
    let pair = scene.connect().await;
    let keep = |_: &Identity, _: &SignedMembers| {
        pair.dialler.close(0u32.into(), b"");
        Ok::<_, Infallible>(())
    };
    let answering = answer(&pair.listener, &scene.enrolment, &scene.key, None, keep);
    let (asked, _) = tokio::join!(scene.ask(&pair.dialler, &scene.code), answering);
    assert!(matches!(asked, Err(AskError::Unconfirmed { .. })), "{asked:?}");
}
