//! JSON as its schema language takes it (JSON Schema 2020-12, 6.1.1): a number without a fraction is an integer, however it
//! is written, and nothing but an object is an object. What serde derives refuses `16.0` and takes arrays for objects.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, Error as _, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Error, Number, Value};

/// The first whole number that a double may stand for by accident.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// JSON that is to become one of the API's types.
pub struct Json(pub Value);

impl<'de> Deserializer<'de> for Json {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => {
                let mut items = SeqDeserializer::new(items.into_iter().map(Json));
                let value = visitor.visit_seq(&mut items)?;
                items.end().map(|()| value)
            }
            Value::Object(fields) => {
                let mut fields = MapDeserializer::new(fields.into_iter().map(|(name, value)| (name, Json(value))));
                let value = visitor.visit_map(&mut fields)?;
                fields.end().map(|()| value)
            }
            Value::Number(number) => match whole(&number) {
                Some(whole) => visitor.visit_i64(whole),
                None => Value::Number(number).deserialize_any(visitor),
            },
            other => other.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if self.0.is_array() {
            return Err(Error::invalid_type(Unexpected::Seq, &"an object"));
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, Error> for Json {
    type Deserializer = Json;

    fn into_deserializer(self) -> Json {
        self
    }
}

/// The integer that a number with a point or an exponent is.
fn whole(number: &Number) -> Option<i64> {
    let value = number.as_f64().filter(|value| number.is_f64() && value.fract() == 0.0 && value.abs() < EXACT)?;
    Some(value as i64)
}
