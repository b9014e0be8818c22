//! Bytes as text that people read, type and dictate: base32 without I, L, O and U (Crockford's).

use std::sync::LazyLock;

use data_encoding::{Encoding, Specification};

static BASE32: LazyLock<Encoding> = LazyLock::new(|| {
    let mut base32 = Specification::new();
    base32.symbols.push_str("0123456789ABCDEFGHJKMNPQRSTVWXYZ");
    // What is taken for another character is that character.
    base32.translate.from.push_str("abcdefghjkmnpqrstvwxyzOoIiLl");
    base32.translate.to.push_str("ABCDEFGHJKMNPQRSTVWXYZ001111");
    base32.encoding().expect("32 symbols, each once")
});

/// The bytes in capitals, most significant bit first.
pub(crate) fn encode(bytes: &[u8]) -> String {
    BASE32.encode(bytes)
}

/// The bytes that [`encode`] made into `text`, in capitals or small letters.
pub(crate) fn decode(text: &str) -> Option<Vec<u8>> {
    BASE32.decode(text.as_bytes()).ok()
}

/// A text of [`encode`]'s characters as [`encode`] spells it, whole bytes or not.
pub(crate) fn normal(text: &str) -> Option<String> {
    let spelt = |symbol: char| match symbol.to_ascii_uppercase() {
        'O' => Some('0'),
        'I' | 'L' => Some('1'),
        'U' => None,
        symbol => symbol.is_ascii_alphanumeric().then_some(symbol),
    };
    text.chars().map(spelt).collect()
}
