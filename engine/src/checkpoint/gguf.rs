//! The GGUF container, versions 2 and 3, little-endian: header, metadata, directory of tensors.
//!
//! Follows ggml's `docs/gguf.md`. What the metadata means is `gguf_model`'s business; here it is only made safe to
//! look at. Arrays stay in the mapped file and are walked when asked for.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use super::{CheckpointError, DType, Entry, Mapped};

/// First bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Longest string accepted, in bytes; chat templates are the longest real ones, with some 10 KiB.
const STRING_BYTES_MAX: u64 = 16 << 20;
/// Arrays may nest this deep; real files never nest them.
const ARRAY_DEPTH_MAX: usize = 4;
/// Extents of a tensor, ggml's own bound.
const DIMS_MAX: u32 = 4;
/// Alignment of tensor data where `general.alignment` is absent, in bytes.
const ALIGNMENT_DEFAULT: u64 = 32;
/// Largest alignment accepted; real files use 32 or a page.
const ALIGNMENT_MAX: u64 = 1 << 20;
/// Most parts of a split model; `gguf-split` numbers them with five digits, real models have a few dozen.
const PARTS_MAX: usize = 1024;

/// ggml's tensor types: id, name, elements and bytes of a block. Ids that are missing were withdrawn.
pub const GGML_TYPES: &[(u32, &str, usize, usize)] = &[
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
];

/// The loadable format of a ggml type name.
fn loadable(name: &str) -> Option<DType> {
    DType::ALL.into_iter().find(|dtype| dtype.name() == name)
}

/// ggml's id of a loadable format.
pub fn type_id(dtype: DType) -> u32 {
    GGML_TYPES.iter().find(|(_, name, ..)| *name == dtype.name()).map_or(0, |(id, ..)| *id)
}

/// One metadata value. Integers of every width are carried in 64 bits.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// u8, u16, u32 or u64.
    Uint(u64),
    /// i8, i16, i32 or i64.
    Int(i64),
    /// f32 or f64.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A UTF-8 string.
    Text(String),
    /// An array, left in the file.
    Array(Array),
}

/// An array in the file: its bounds are checked, its items are not yet read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    kind: u32,
    count: u64,
    at: usize,
}

impl Array {
    /// Items.
    pub fn count(&self) -> u64 {
        self.count
    }
}

/// What a file says before its tensor data begins.
#[derive(Clone, Debug)]
pub struct Directory {
    /// The file it was read from.
    pub(super) file: PathBuf,
    /// Metadata by key.
    pub(super) metadata: BTreeMap<String, Value>,
    /// Tensors, in the file's order.
    pub(super) entries: Vec<Entry>,
}

impl Directory {
    /// Reads the directory in `bytes`, which is a whole file; `file` appears in messages.
    ///
    /// # Errors
    /// [`CheckpointError`] naming the position and what was being read there.
    pub fn parse(bytes: &[u8], file: &Path) -> Result<Self, CheckpointError> {
        let mut cursor = Cursor { bytes, at: 0, file, reading: "the header".into() };
        cursor.header()?;
        let tensors = cursor.u64()?;
        let keys = cursor.u64()?;
        // A key is at least a length, a type and a byte; a tensor two lengths, an extent, a type and an offset.
        cursor.fits(keys, 13, "metadata keys")?;
        cursor.fits(tensors, 32, "tensors")?;
        let metadata = cursor.metadata(keys)?;
        let alignment = alignment(&metadata, file)?;
        let mut entries = Vec::new();
        let mut seen = HashSet::new();
        for number in 0..tensors {
            cursor.reading = format!("tensor {number} of {tensors}");
            let entry = cursor.tensor(alignment)?;
            if !seen.insert(entry.source_name.clone()) {
                return Err(cursor.tensor_error(&entry.source_name, "is listed twice"));
            }
            entries.push(entry);
        }
        let data = (cursor.at as u64).next_multiple_of(alignment) as usize;
        for entry in &mut entries {
            entry.offset = entry
                .offset
                .checked_add(data)
                .ok_or_else(|| cursor.tensor_error(&entry.source_name, "its offset overflows"))?;
        }
        Ok(Self { file: file.into(), metadata, entries })
    }

    /// A string by its key.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.metadata.get(key) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The items of an array of strings.
    ///
    /// # Errors
    /// [`CheckpointError::Malformed`] when the key is no array of strings or one of them is not UTF-8.
    pub(super) fn strings(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<String>>, CheckpointError> {
        self.items(key, bytes, "strings", |kind| kind == kind::STRING, |cursor, _| cursor.string())
    }

    /// The items of an array of integers.
    ///
    /// # Errors
    /// [`CheckpointError::Malformed`] when the key is something else.
    pub(super) fn integers(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<i64>>, CheckpointError> {
        self.items(key, bytes, "integers", is_integer, |cursor, kind| {
            Ok(match cursor.value(kind, 0)? {
                Value::Uint(n) => i64::try_from(n).unwrap_or(i64::MAX),
                Value::Int(n) => n,
                _ => 0,
            })
        })
    }

    /// The items of an array of floats.
    ///
    /// # Errors
    /// [`CheckpointError::Malformed`] when the key is something else.
    pub(super) fn floats(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<f32>>, CheckpointError> {
        let floats = |kind| kind == kind::F32 || kind == kind::F64;
        self.items(key, bytes, "floats", floats, |cursor, kind| {
            Ok(match cursor.value(kind, 0)? {
                Value::Float(x) => x as f32,
                _ => 0.0,
            })
        })
    }

    fn items<T>(
        &self,
        key: &str,
        bytes: &[u8],
        expected: &str,
        accepts: impl Fn(u32) -> bool,
        read: impl Fn(&mut Cursor<'_>, u32) -> Result<T, CheckpointError>,
    ) -> Result<Option<Vec<T>>, CheckpointError> {
        let Some(value) = self.metadata.get(key) else {
            return Ok(None);
        };
        let mut cursor = Cursor { bytes, at: 0, file: &self.file, reading: format!("metadata `{key}`") };
        match value {
            Value::Array(array) if accepts(array.kind) => {
                cursor.at = array.at;
                // The count was compared with the bytes that are there when the directory was read.
                (0..array.count).map(|_| read(&mut cursor, array.kind)).collect::<Result<_, _>>().map(Some)
            }
            _ => Err(cursor.malformed(format!("expected an array of {expected}"))),
        }
    }
}

fn is_integer(kind: u32) -> bool {
    matches!(kind, kind::U8..=kind::I32 | kind::U64 | kind::I64)
}

fn alignment(metadata: &BTreeMap<String, Value>, file: &Path) -> Result<u64, CheckpointError> {
    match metadata.get("general.alignment") {
        None => Ok(ALIGNMENT_DEFAULT),
        Some(Value::Uint(n)) if n.is_power_of_two() && *n <= ALIGNMENT_MAX => Ok(*n),
        Some(other) => {
            let accepted = format!("a power of two, at most {ALIGNMENT_MAX}");
            Err(crate::config::invalid(file, "general.alignment", format!("{other:?}"), accepted).into())
        }
    }
}

/// The type codes of metadata values.
mod kind {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

/// A position in the file that knows what it is reading.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    file: &'a Path,
    reading: String,
}

impl Cursor<'_> {
    fn header(&mut self) -> Result<(), CheckpointError> {
        let magic: [u8; 4] = self.take()?;
        if magic != MAGIC {
            let found = format!("a file that begins with {magic:02x?}, not with \"GGUF\"");
            return Err(CheckpointError::NotAModel { path: self.file.into(), found });
        }
        let version = self.u32()?;
        // Versions are small: with its low half empty, the number was written the other way round.
        if version & 0xffff == 0 && version != 0 {
            return Err(CheckpointError::BigEndian { file: self.file.into() });
        }
        if !(2..=3).contains(&version) {
            return Err(CheckpointError::GgufVersion { file: self.file.into(), version });
        }
        Ok(())
    }

    fn metadata(&mut self, keys: u64) -> Result<BTreeMap<String, Value>, CheckpointError> {
        let mut metadata = BTreeMap::new();
        for number in 0..keys {
            self.reading = format!("metadata key {number} of {keys}");
            let key = self.string()?;
            self.reading = format!("metadata `{key}`");
            let kind = self.u32()?;
            let value = self.value(kind, 0)?;
            if metadata.insert(key, value).is_some() {
                return Err(self.malformed("the key is there twice"));
            }
        }
        Ok(metadata)
    }

    fn value(&mut self, kind: u32, depth: usize) -> Result<Value, CheckpointError> {
        Ok(match kind {
            kind::U8 => Value::Uint(u8::from_le_bytes(self.take()?).into()),
            kind::I8 => Value::Int(i8::from_le_bytes(self.take()?).into()),
            kind::U16 => Value::Uint(u16::from_le_bytes(self.take()?).into()),
            kind::I16 => Value::Int(i16::from_le_bytes(self.take()?).into()),
            kind::U32 => Value::Uint(self.u32()?.into()),
            kind::I32 => Value::Int(i32::from_le_bytes(self.take()?).into()),
            kind::F32 => Value::Float(f32::from_le_bytes(self.take()?).into()),
            kind::BOOL => match self.take::<1>()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.malformed(format!("a boolean is {other}, not 0 or 1"))),
            },
            kind::STRING => Value::Text(self.string()?),
            kind::ARRAY => Value::Array(self.array(depth)?),
            kind::U64 => Value::Uint(self.u64()?),
            kind::I64 => Value::Int(i64::from_le_bytes(self.take()?)),
            kind::F64 => Value::Float(f64::from_le_bytes(self.take()?)),
            other => {
                return Err(self.malformed(format!("value type {other} is unknown; types are 0 to 12")));
            }
        })
    }

    /// Steps over an array, so that its items can be read later without a bound being missed.
    fn array(&mut self, depth: usize) -> Result<Array, CheckpointError> {
        if depth == ARRAY_DEPTH_MAX {
            return Err(self.malformed(format!("arrays nest deeper than {ARRAY_DEPTH_MAX}")));
        }
        let kind = self.u32()?;
        let count = self.u64()?;
        let item_bytes = match kind {
            kind::U8 | kind::I8 | kind::BOOL => 1,
            kind::U16 | kind::I16 => 2,
            kind::U32 | kind::I32 | kind::F32 => 4,
            kind::U64 | kind::I64 | kind::F64 | kind::STRING => 8,
            kind::ARRAY => 12,
            other => {
                return Err(self.malformed(format!("item type {other} is unknown; types are 0 to 12")));
            }
        };
        self.fits(count, item_bytes, "items")?;
        let array = Array { kind, count, at: self.at };
        match kind {
            kind::STRING => (0..count).try_for_each(|_| self.string_bytes().map(drop))?,
            kind::ARRAY => (0..count).try_for_each(|_| self.array(depth + 1).map(drop))?,
            // `fits` has just compared the product with the bytes that remain.
            _ => self.at += count as usize * item_bytes as usize,
        }
        Ok(array)
    }

    fn tensor(&mut self, alignment: u64) -> Result<Entry, CheckpointError> {
        let source_name = self.string()?;
        self.reading = format!("the directory entry of tensor `{source_name}`");
        let dims = self.u32()?;
        if !(1..=DIMS_MAX).contains(&dims) {
            return Err(self.tensor_error(&source_name, format!("it has {dims} extents, not 1 to {DIMS_MAX}")));
        }
        let mut shape = Vec::with_capacity(dims as usize);
        for _ in 0..dims {
            let extent = self.u64()?;
            match usize::try_from(extent) {
                Ok(extent) if extent > 0 => shape.push(extent),
                _ => return Err(self.tensor_error(&source_name, format!("an extent is {extent}"))),
            }
        }
        // The file has the innermost extent first.
        shape.reverse();
        let ggml_type = self.u32()?;
        let offset = self.u64()?;
        if offset % alignment != 0 {
            let what = format!("its offset {offset} is no multiple of the alignment, {alignment}");
            return Err(self.tensor_error(&source_name, what));
        }
        let offset = usize::try_from(offset).map_err(|_| self.tensor_error(&source_name, "its offset overflows"))?;
        let known = GGML_TYPES.iter().find(|(id, ..)| *id == ggml_type);
        let bytes = match known {
            Some((_, name, elements, bytes)) => {
                Some(self.tensor_bytes(&source_name, &shape, name, *elements, *bytes)?)
            }
            None => None,
        };
        let name = known.map_or_else(|| format!("ggml type {ggml_type}"), |(_, name, ..)| (*name).to_owned());
        Ok(Entry { source_name, dtype: loadable(&name).ok_or(name), shape, offset, bytes })
    }

    fn tensor_bytes(
        &self,
        tensor: &str,
        shape: &[usize],
        name: &str,
        block_elements: usize,
        block_bytes: usize,
    ) -> Result<usize, CheckpointError> {
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(block_elements) {
            let what = format!("its rows of {row} elements are no whole number of {name} blocks of {block_elements}");
            return Err(self.tensor_error(tensor, what));
        }
        // ggml counts elements in i64; the bound keeps every later product of extents in range.
        let elements = shape.iter().try_fold(1_usize, |product, extent| product.checked_mul(*extent));
        let bytes = elements.and_then(|n| (n / block_elements).checked_mul(block_bytes));
        bytes.ok_or_else(|| self.tensor_error(tensor, format!("its extents {shape:?} overflow")))
    }

    /// A claimed number of items of at least `item_bytes` each is possible in what is left of the file.
    fn fits(&self, count: u64, item_bytes: u64, what: &str) -> Result<(), CheckpointError> {
        let left = (self.bytes.len() - self.at) as u64;
        if count <= left / item_bytes {
            return Ok(());
        }
        Err(self.malformed(format!(
            "{count} {what} cannot fit in the {left} bytes that are left of the file; it is truncated or damaged"
        )))
    }

    fn string(&mut self) -> Result<String, CheckpointError> {
        let start = self.at;
        match std::str::from_utf8(self.string_bytes()?) {
            Ok(text) => Ok(text.to_owned()),
            Err(e) => {
                self.at = start;
                Err(self.malformed(format!("a string is not UTF-8: {e}")))
            }
        }
    }

    fn string_bytes(&mut self) -> Result<&[u8], CheckpointError> {
        let len = self.u64()?;
        if len > STRING_BYTES_MAX {
            return Err(self.malformed(format!("a string of {len} bytes; at most {STRING_BYTES_MAX} are accepted")));
        }
        self.slice(len as usize)
    }

    fn u32(&mut self) -> Result<u32, CheckpointError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, CheckpointError> {
        self.take().map(u64::from_le_bytes)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], CheckpointError> {
        let mut out = [0; N];
        out.copy_from_slice(self.slice(N)?);
        Ok(out)
    }

    fn slice(&mut self, len: usize) -> Result<&[u8], CheckpointError> {
        match self.bytes.get(self.at..).and_then(|rest| rest.get(..len)) {
            Some(slice) => {
                self.at += len;
                Ok(slice)
            }
            None => Err(CheckpointError::Truncated {
                file: self.file.into(),
                at: self.at as u64,
                reading: self.reading.clone(),
                len: self.bytes.len() as u64,
            }),
        }
    }

    fn malformed(&self, what: impl Into<String>) -> CheckpointError {
        CheckpointError::Malformed {
            file: self.file.into(),
            at: self.at as u64,
            reading: self.reading.clone(),
            what: what.into(),
        }
    }

    fn tensor_error(&self, tensor: &str, what: impl Into<String>) -> CheckpointError {
        CheckpointError::Tensor { file: self.file.into(), tensor: tensor.into(), what: what.into() }
    }
}

/// Opens a file and, when it is one part of a split model, the others beside it; the first comes first.
pub(super) fn open_parts(path: &Path) -> Result<Vec<(Mapped, Directory)>, CheckpointError> {
    let open = |path: &Path| -> Result<(Mapped, Directory), CheckpointError> {
        let mapped = Mapped::open(path)?;
        let directory = Directory::parse(mapped.bytes(), path)?;
        Ok((mapped, directory))
    };
    let part_error = |path: &Path, what: String| CheckpointError::Part { path: path.into(), what };
    let (mapped, directory) = open(path)?;
    let count = directory.uint("split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![(mapped, directory)]);
    }
    let count = usize::try_from(count).ok().filter(|n| *n <= PARTS_MAX);
    let Some(count) = count else {
        return Err(part_error(path, format!("claims to be split into more than {PARTS_MAX} parts")));
    };
    let suffix_of = |number: usize| format!("-{number:05}-of-{count:05}.gguf");
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let stem = (1..=count).find_map(|number| name.strip_suffix(&suffix_of(number)));
    let Some(stem) = stem else {
        let what =
            format!("is one of {count} parts; give it back its name, …{}, with the others beside it", suffix_of(1));
        return Err(part_error(path, what));
    };
    let mut parts = Vec::with_capacity(count);
    for number in 1..=count {
        let part_path = path.with_file_name(format!("{stem}{}", suffix_of(number)));
        if !part_path.is_file() {
            return Err(part_error(
                &part_path,
                format!("part {number} of {count} is missing; all must be in one folder"),
            ));
        }
        let (mapped, directory) = open(&part_path)?;
        let found = (directory.uint("split.no")?, directory.uint("split.count")?);
        if found != (Some(number as u64 - 1), Some(count as u64)) {
            let what = format!("its metadata does not say part {number} of {count}; the parts are of different models");
            return Err(part_error(&part_path, what));
        }
        parts.push((mapped, directory));
    }
    let total: usize = parts.iter().map(|(_, directory)| directory.entries.len()).sum();
    match parts[0].1.uint("split.tensors.count")? {
        Some(declared) if declared != total as u64 => {
            Err(part_error(path, format!("declares {declared} tensors, but its {count} parts hold {total}")))
        }
        _ => Ok(parts),
    }
}
