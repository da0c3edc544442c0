//! Quantities of Kubernetes (`1536Mi`, `25`, `2e3`): whole numbers, as the capacities of a GPU are.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Suffixes of powers of two, the largest last.
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
/// Suffixes of powers of ten, and the powers.
const DECIMAL: [(&str, i32); 9] =
    [("n", -9), ("u", -6), ("m", -3), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];

/// A size in bytes, in the form in which the API server writes it.
#[must_use]
pub fn bytes(bytes: u64) -> Quantity {
    let steps = if bytes == 0 { 0 } else { (bytes.trailing_zeros() as usize / 10).min(BINARY.len()) };
    let suffix = steps.checked_sub(1).map_or("", |last| BINARY[last]);
    Quantity(format!("{}{suffix}", bytes >> (10 * steps)))
}

/// A plain number.
#[must_use]
pub fn number(number: u64) -> Quantity {
    Quantity(number.to_string())
}

/// The whole number that a quantity says; one with a fraction is rounded up, as Kubernetes does. None: it says none, or a negative one, or one
/// that is too large.
#[must_use]
pub fn whole(quantity: &Quantity) -> Option<u64> {
    let (mantissa, ten) = read(quantity)?;
    let whole = match ten {
        Power::Times(ten) => mantissa.checked_mul(ten)?,
        Power::By(ten) => mantissa.div_ceil(ten),
    };
    whole.try_into().ok()
}

/// The quantity as this driver would write it, if it is a whole number: the API server writes `1k` for `1000`. Another one stays as it is.
#[must_use]
pub fn plain(quantity: &Quantity) -> Quantity {
    let has_fraction = matches!(read(quantity), Some((mantissa, Power::By(ten))) if mantissa % ten > 0);
    let whole = whole(quantity).filter(|_| !has_fraction);
    whole.map_or_else(|| quantity.clone(), number)
}

/// A power of ten that a number is multiplied with, or divided by.
enum Power {
    Times(u128),
    By(u128),
}

/// A number, and the power of ten that makes it the quantity.
fn read(quantity: &Quantity) -> Option<(u128, Power)> {
    let text = quantity.0.as_str();
    let digits = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let (units, fraction) = number.split_once('.').unwrap_or((number, ""));
    let places: i32 = fraction.len().try_into().ok().filter(|&places| places <= 18)?;
    // The number is `mantissa` × 10^-places × factor.
    let mantissa: u128 = format!("{units}{fraction}").parse().ok()?;
    let (factor, power) = if let Some(step) = BINARY.iter().position(|known| *known == suffix) {
        (1_u128 << (10 * (step + 1)), 0)
    } else if suffix.is_empty() {
        (1, 0)
    } else if let Some(&(_, power)) = DECIMAL.iter().find(|(known, _)| *known == suffix) {
        (1, power)
    } else {
        (1, suffix.strip_prefix(['e', 'E'])?.parse::<i8>().ok()?.into())
    };
    let product = mantissa.checked_mul(factor)?;
    let power = power - places;
    let ten = 10_u128.checked_pow(power.unsigned_abs())?;
    Some((product, if power < 0 { Power::By(ten) } else { Power::Times(ten) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        for (text, expected) in [
            ("0", Some(0)),
            ("25", Some(25)),
            ("80Gi", Some(80 << 30)),
            ("1.5Gi", Some(3 << 29)),
            ("1536Mi", Some(3 << 29)),
            ("8G", Some(8_000_000_000)),
            ("2e3", Some(2000)),
            ("2E3", Some(2000)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("100m", Some(1)),
            ("2500m", Some(3)),
            ("0.0001Ki", Some(1)),
            ("-1", None),
            ("", None),
            ("Gi", None),
            ("1.2.3", None),
            ("8GB", None),
            ("16Ei", None),
            ("1e99", None),
        ] {
            assert_eq!(whole(&Quantity(text.to_owned())), expected, "{text}");
        }
    }

    #[test]
    fn quantities_of_one_value_are_one() {
        for (one, other, same) in [
            ("1000", "1k", true),
            ("1k", "1e3", true),
            ("1Gi", "1073741824", true),
            ("2", "2000m", true),
            ("2", "1500m", false),
            ("1k", "1Ki", false),
            ("much", "much", true),
            ("much", "0", false),
        ] {
            let [one, other] = [one, other].map(|text| plain(&Quantity(text.to_owned())));
            assert_eq!(one == other, same, "{} {}", one.0, other.0);
        }
    }

    #[test]
    fn quantities_are_written_as_the_api_server_writes_them() {
        for (size, expected) in [
            (0, "0"),
            (1000, "1000"),
            (64 << 20, "64Mi"),
            (80 << 30, "80Gi"),
            (3 << 29, "1536Mi"),
            (1 << 60, "1Ei"),
            ((81_559 << 20) + 512, "85520810496"),
        ] {
            assert_eq!(bytes(size).0, expected);
            assert_eq!(whole(&bytes(size)), Some(size));
        }
        assert_eq!(number(100).0, "100");
    }
}
