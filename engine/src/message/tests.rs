use super::*;
use proptest::prelude::*;

const LIMITS: MessageLimits = MessageLimits {
    tokens: 8,
    sequences: 2,
    context: 64,
    pages: 4,
    outputs: 2,
    edits: 3,
    vocab: 100,
    hidden: 4,
    wire: Wire::F32,
};

fn step() -> Step {
    Step {
        released: vec![7],
        spans: vec![Span { request: 0, sequence: 1, start: 31, count: 3, new_pages: vec![0, 3] }],
        ids: vec![5, 6, 99],
        outputs: vec![OutputRequest {
            row: 2,
            target: 0,
            top_k: 1,
            inverse_temperature: 1.0,
            whole_row: false,
            edits: vec![LogitEdit::new(4, f32::NEG_INFINITY, 1.0, 0.0), LogitEdit::new(99, 0.5, 1.25, -2.0)],
        }],
        until: Some(1),
        from: None,
    }
}

#[test]
fn a_step_survives_the_wire() {
    assert_eq!(decode_step(&encode_step(&step(), &[], &LIMITS), &LIMITS, true), Ok((step(), vec![])));
    let inner = Step { ids: vec![], ..step() };
    // Exact as halves, and in 8 bits since the largest of a row is 127 times a power of two.
    let hidden: Vec<f32> = (0..12).map(|i| if i % 4 == 0 { 63.5 } else { i as f32 - 0.5 }).collect();
    for wire in Wire::ALL {
        let limits = MessageLimits { wire, ..LIMITS };
        let payload = encode_step(&inner, &hidden, &limits);
        assert_eq!(decode_step(&payload, &limits, false), Ok((inner.clone(), hidden.clone())), "{wire}");
        let shorter = decode_step(&payload[..payload.len() - 1], &limits, false);
        assert!(matches!(shorter, Err(MessageError::Activations(_))), "{wire}");
    }
}

#[test]
fn what_is_over_a_limit_is_refused() {
    #[track_caller]
    fn refused(change: impl FnOnce(&mut Step), expected: &str) {
        let mut step = step();
        change(&mut step);
        assert_eq!(decode_step(&encode_step(&step, &[], &LIMITS), &LIMITS, true).unwrap_err().to_string(), expected);
    }
    refused(|s| s.spans[0].start = 62, "position 65 is over the limit of 64");
    refused(|s| s.spans[0].start = u32::MAX, "position 4294967298 is over the limit of 64");
    refused(|s| s.spans[0].new_pages = vec![4], "page 5 is over the limit of 4");
    refused(|s| s.spans[0].count = 9, "number of tokens 9 is over the limit of 8");
    refused(|s| s.spans = vec![s.spans[0].clone(); 3], "number of sequences 3 is over the limit of 2");
    refused(|s| s.outputs[0].row = 3, "output row 4 is over the limit of 3");
    refused(|s| s.outputs[0].target = 100, "target id 101 is over the limit of 100");
    refused(|s| s.ids[0] = 100, "token id 101 is over the limit of 100");
    refused(|s| s.ids.clear(), "token ids: 0 where 3 were announced");
    refused(|s| s.outputs[0].edits[1].id = 100, "edited id 101 is over the limit of 100");
    refused(|s| s.outputs = vec![s.outputs[0].clone(); 2], "number of edits 4 is over the limit of 3");
    let malformed = "payload's description is malformed";
    refused(|s| s.outputs[0].edits[1].id = 4, &format!("{malformed}: an edit of token 4 behind one of 4"));
    for (bias, repetition, subtract) in [
        (f32::NAN, 1.0, 0.0),
        (f32::INFINITY, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (0.0, -1.0, 0.0),
        (0.0, f32::INFINITY, 0.0),
        (0.0, f32::NAN, 0.0),
        (0.0, 1.0, f32::NEG_INFINITY),
        (0.0, 1.0, f32::NAN),
    ] {
        let edit = LogitEdit { id: 4, bias, repetition, subtract };
        refused(|s| s.outputs[0].edits[0] = edit, &format!("{malformed}: out of range: {edit:?}"));
    }
}

#[test]
fn edits_follow_their_definition() {
    #[track_caller]
    fn check(logit: f32, edit: (f32, f32, f32), expected: f32) {
        let found = LogitEdit::new(0, edit.0, edit.1, edit.2).apply(logit);
        assert_eq!(found.to_bits(), expected.to_bits(), "{found} for {expected}");
    }
    check(4.0, (0.0, 2.0, 0.0), 2.0);
    check(-4.0, (0.0, 2.0, 0.0), -8.0);
    check(4.0, (-5.0, 2.0, 0.5), -2.5);
    check(-4.0, (6.0, 4.0, 0.25), 0.25);
    check(1.0, (-1.0, 1.5, 0.0), 0.0);
    // 0.1 / 3 would be another float, and so would a product and a difference that are rounded once.
    check(0.1, (0.0, 3.0, 0.01), 0.1 * (1.0 / 3.0) - 0.01);
    check(7.5, (f32::NEG_INFINITY, 2.0, 1.0), f32::NEG_INFINITY);
    check(7.5, (f32::NAN, f32::NAN, f32::NAN), 7.5);
    check(7.5, (f32::INFINITY, 1.0, 0.0), 1e30);
}

proptest! {
    #[test]
    fn edited_logits_are_never_nan_and_never_too_large(
        logit in -1e4f32..1e4, bias: f32, repetition: f32, subtract: f32, temperature in 1e-5f32..10.0,
    ) {
        let edited = LogitEdit::new(0, bias, repetition, subtract).apply(logit);
        prop_assert!(edited < f32::INFINITY);
        let divided = edited * (1.0 / temperature);
        prop_assert!(divided < f32::INFINITY, "{divided}");
    }
}

#[test]
fn missing_activations_and_cut_payloads_are_refused() {
    let payload = encode_step(&Step { ids: vec![], ..step() }, &[1.0; 12], &LIMITS);
    for length in 0..payload.len() {
        assert!(decode_step(&payload[..length], &LIMITS, false).is_err(), "{length} bytes");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for wire in Wire::ALL {
            let limits = MessageLimits { wire, ..LIMITS };
            let _ = decode_step(&bytes, &limits, true);
            let _ = decode_step(&bytes, &limits, false);
        }
        let _ = decode_outputs(&bytes, &LIMITS);
    }

    #[test]
    fn changed_bytes_are_a_message_or_an_error(at in 0usize..40, value: u8) {
        let mut payload = encode_step(&step(), &[], &LIMITS);
        let at = at % payload.len();
        payload[at] = value;
        if let Ok((step, _)) = decode_step(&payload, &LIMITS, true) {
            prop_assert!(step.tokens() <= LIMITS.tokens);
        }
    }
}
