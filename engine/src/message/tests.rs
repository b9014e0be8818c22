use super::*;
use proptest::prelude::*;

const LIMITS: MessageLimits =
    MessageLimits { tokens: 8, sequences: 2, context: 64, pages: 4, outputs: 2, vocab: 100, hidden: 4 };

fn step() -> Step {
    Step {
        released: vec![7],
        spans: vec![Span { sequence: 1, start: 31, count: 3, new_pages: vec![0, 3] }],
        ids: vec![5, 6, 99],
        outputs: vec![OutputRequest { row: 2, target: 0, top_k: 1, inverse_temperature: 1.0, whole_row: false }],
        fetch_rows: vec![],
    }
}

#[test]
fn a_step_survives_the_wire() {
    assert_eq!(decode_step(&encode(&step(), &[]), &LIMITS, true), Ok((step(), vec![])));
    let inner = Step { ids: vec![], ..step() };
    let hidden: Vec<f32> = (0..12).map(|i| i as f32 - 0.5).collect();
    assert_eq!(decode_step(&encode(&inner, &hidden), &LIMITS, false), Ok((inner, hidden)));
}

#[test]
fn what_is_over_a_limit_is_refused() {
    #[track_caller]
    fn refused(change: impl FnOnce(&mut Step), expected: &str) {
        let mut step = step();
        change(&mut step);
        assert_eq!(decode_step(&encode(&step, &[]), &LIMITS, true).unwrap_err().to_string(), expected);
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
    refused(|s| s.fetch_rows = vec![2], "row to fetch 3 is over the limit of 2");
}

#[test]
fn missing_activations_and_cut_payloads_are_refused() {
    let payload = encode(&Step { ids: vec![], ..step() }, &[1.0; 12]);
    for length in 0..payload.len() {
        assert!(decode_step(&payload[..length], &LIMITS, false).is_err(), "{length} bytes");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode_step(&bytes, &LIMITS, true);
        let _ = decode_outputs(&bytes, &LIMITS);
    }

    #[test]
    fn changed_bytes_are_a_message_or_an_error(at in 0usize..40, value: u8) {
        let mut payload = encode(&step(), &[]);
        let at = at % payload.len();
        payload[at] = value;
        if let Ok((step, _)) = decode_step(&payload, &LIMITS, true) {
            prop_assert!(step.tokens() <= LIMITS.tokens);
        }
    }
}
