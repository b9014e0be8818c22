use pp_engine::{
    backend::gpu::{Gpu, adapter::Adapter},
    checkpoint::Checkpoint,
    layout::*,
    message::*,
    stage::Stage,
};
use pp_shaders::{Act, KvType, Profile};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
fn main() {
    let path = std::env::args().nth(1).unwrap();
    let mode = if std::env::var("EXACT").is_ok() { Act::F32 } else { Act::Q8 };
    let kv = if mode == Act::F32 { KvType::F32 } else { KvType::F16 };
    let mut profile = if std::env::var("CARD").is_ok() { Profile::CARD } else { Profile::SOFTWARE };
    if let Ok(c) = std::env::var("PROFILE") {
        for kv in c.split(',') {
            let (k, v) = kv.split_once('=').unwrap();
            let v: u32 = v.parse().unwrap();
            match k {
                "rows" => profile.matvec_rows = v,
                "groups" => profile.matvec_groups = v,
                "mrows" => profile.matmul_rows = v,
                "mcols" => profile.matmul_cols = v,
                "mlanes" => profile.matmul_lanes = v,
                "flat" => profile.flat = v,
                "norm" => profile.norm = v,
                "dec" => profile.decode_threads = v,
                "tile" => profile.prefill_tile = v,
                "topk" => profile.topk = v,
                "tiled" => profile.tiled = v == 1,
                _ => panic!("{k}"),
            }
        }
    }
    let ctx: usize = std::env::var("CTX").map(|v| v.parse().unwrap()).unwrap_or(1024);
    let cp = Arc::new(Checkpoint::open(std::path::Path::new(&path)).unwrap());
    let adapter = Adapter::choose(&Adapter::all(), &[], 1).unwrap().remove(0);
    let t = Instant::now();
    let gpu = Gpu::open(&adapter, profile, false).unwrap();
    let spec = StageSpec::pipeline(&[cp.config.layers]).remove(0);
    use pp_engine::backend::Backend;
    let layout = StageLayout::new(
        &cp,
        spec,
        StageOptions { activations: mode, kv, context: ctx, sequences: 1, chunk: 128 },
        &profile,
        gpu.limits(),
    )
    .unwrap();
    println!("planned {} MB", layout.device_bytes() / 1_000_000);
    let mut stage = Stage::open(&cp, layout, Box::new(gpu), &mut |_| true).unwrap();
    println!("open {:.2}s allocated {} MB", t.elapsed().as_secs_f64(), stage.backend().allocated_bytes() / 1_000_000);
    let vocab = cp.config.vocab as u32;
    let pages: Vec<u32> = (0..(ctx / 32) as u32).collect();
    let out = |row| OutputRequest { row, target: 0, top_k: 1, inverse_temperature: 1.0, whole_row: false };
    let n: usize = std::env::var("N").map(|v| v.parse().unwrap()).unwrap_or(128);
    for rep in 0..3 {
        let t = Instant::now();
        let ids: Vec<u32> = (0..n as u32).map(|i| (i * 37 + 11) % vocab).collect();
        let step = Step {
            released: vec![1],
            spans: vec![Span { sequence: 1, start: 0, count: n as u32, new_pages: pages.clone() }],
            ids,
            outputs: vec![out(n as u32 - 1)],
            fetch_rows: vec![],
        };
        stage.step(&step, &[]).unwrap();
        let p = t.elapsed().as_secs_f64();
        let t = Instant::now();
        let d = 16;
        for i in 0..d {
            let step = Step {
                spans: vec![Span { sequence: 1, start: (n + i) as u32, count: 1, new_pages: vec![] }],
                ids: vec![5],
                outputs: vec![out(0)],
                ..Step::default()
            };
            stage.step(&step, &[]).unwrap();
        }
        let q = t.elapsed().as_secs_f64();
        println!(
            "rep {rep}: prefill {:.1} tok/s  decode {:.1} tok/s ({:.2} ms)",
            n as f64 / p,
            d as f64 / q,
            q / d as f64 * 1e3
        );
    }
    for tokens in [1, n] {
        let programs = stage.programs(n, tokens, 1).unwrap();
        let times = stage.time(&programs).unwrap();
        let mut by: BTreeMap<String, (f64, u64, f64)> = BTreeMap::new();
        for t in &times {
            let op = &stage.program(programs[t.op.0].0).ops[t.op.1];
            let key = format!(
                "{:<18} {}",
                op.variant.label(),
                op.note.split(' ').next_back().unwrap().split('.').next_back().unwrap()
            );
            let e = by.entry(key).or_default();
            e.0 += t.seconds;
            e.1 += 1;
            let count = if t.op.0 == 0 { tokens } else { 1 };
            e.2 += op.operations as f64 * count as f64;
        }
        let total: f64 = by.values().map(|v| v.0).sum();
        println!("--- {tokens} tokens: {:.2} ms", total * 1e3);
        for (k, v) in by {
            println!(
                "{k:<48} {:8.3} ms {:4} x {:6.1} us  {:5.1} GOP/s",
                v.0 * 1e3,
                v.1,
                v.0 / v.1 as f64 * 1e6,
                v.2 / v.0 / 1e9
            );
        }
    }
}
