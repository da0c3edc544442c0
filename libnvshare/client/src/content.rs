//! The knowledge about a piece of memory: whether it is all zero, and its hash.
//!
//! A piece whose hash is that of the host's copy is not copied out again, so a collision would lose a change. The hash
//! is a polynomial in eleven secret keys, modulo p = 2^130 - 5, of which the lowest 128 bits are kept. A piece consists of
//! 16-byte words, and the word of number `512 j + t` is the coefficient of
//!
//! ```text
//! sum × word^(J - 1 - j) × (the product of bits[b] over the bits b that are set in t)
//! ```
//!
//! where J is how many words there are with that `t`. So 512 threads each evaluate a polynomial of one variable, and their
//! results are joined by pairs.
//!
//! **Bound.** Words are below p. Two pieces that differ have polynomials that differ. Their total degree is at most 265: 255
//! for 2 MiB, nine bits, and `sum`, a factor of each term. Their hashes are equal only if the difference of the polynomials is
//! one of 7 multiples of 2^128. No other multiple can be a difference of remainders. Each key is drawn from 2^106 numbers (they
//! are clamped as in Poly1305). So by the lemma of Schwartz and Zippel, that has a probability of at most 7 × 265 / 2^106 <
//! 2^-95. This holds for all pieces that do not depend on the keys. A program that compares a million pieces a second meets a
//! collision once in 10^15 years on average.

/// The number of a kernel's threads for a piece.
const THREADS: usize = 512;
/// The bits of a thread's number.
const BITS: usize = 9;
/// Bytes of a word.
const WORD: usize = 16;
/// Random bytes that a set of keys is made of.
pub const KEY_BYTES: usize = 16 * (BITS + 2);

/// A factor, as four words from the lowest; it leaves room for carries, as in Poly1305.
type Key = [u32; 4];

/// The secret of a process, as the kernel takes it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Keys {
    word: Key,
    bits: [Key; BITS],
    sum: Key,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

impl Keys {
    /// Keys of random bytes.
    #[must_use]
    pub fn new(random: &[u8; KEY_BYTES]) -> Self {
        let mut keys = random.as_chunks::<WORD>().0.iter().map(|bytes| {
            let mut key = [0; 4];
            for (word, bytes) in key.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *word = u32::from_le_bytes(*bytes) & 0x0fff_fffc;
            }
            // The lowest word keeps its lowest bits.
            key[0] |= u32::from(bytes[0] & 3);
            key
        });
        let mut next = || keys.next().unwrap_or_default();
        Self { word: next(), bits: std::array::from_fn(|_| next()), sum: next() }
    }
}

/// The hash of a piece: 128 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hash(pub [u64; 2]);

/// The answer about a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentCheck {
    /// All bytes are zero.
    Zero,
    /// Some are not; the hash, if hashes are made.
    Data(Option<Hash>),
}

/// A number modulo 2^130 - 5, in parts of 44, 44 and 42 bits, from the lowest. The second may have one bit more.
#[derive(Debug, Clone, Copy, Default)]
struct Number([u64; 3]);

const PART: u64 = (1 << 44) - 1;
const LAST: u64 = (1 << 42) - 1;

impl Number {
    fn of(value: u128) -> Self {
        Self([value as u64 & PART, (value >> 44) as u64 & PART, (value >> 88) as u64])
    }

    fn of_key(key: Key) -> Self {
        Self::of(key.iter().rev().fold(0, |value, &word| value << 32 | u128::from(word)))
    }

    /// Carries what parts have too much. Two to the 130 is five.
    fn carried([low, middle, high]: [u128; 3]) -> Self {
        let middle = middle + (low >> 44);
        let high = high + (middle >> 44);
        let low = (low & u128::from(PART)) + (high >> 42) * 5;
        let middle = (middle & u128::from(PART)) + (low >> 44);
        Self([low as u64 & PART, middle as u64, high as u64 & LAST])
    }

    fn plus(self, other: Self) -> Self {
        let ([a, b, c], [d, e, f]) = (self.0.map(u128::from), other.0.map(u128::from));
        Self::carried([a + d, b + e, c + f])
    }

    fn times(self, other: Self) -> Self {
        let ([a, b, c], [d, e, f]) = (self.0.map(u128::from), other.0.map(u128::from));
        // Two to the 132, the place of the fourth part, is twenty.
        Self::carried([a * d + 20 * (b * f + c * e), a * e + b * d + 20 * c * f, a * f + b * e + c * d])
    }

    /// The lowest 128 bits of the remainder.
    fn low(self) -> u128 {
        let twice = Self::carried(Self::carried(self.0.map(u128::from)).0.map(u128::from)).0;
        // Whether it is the modulus or more shows when five are added.
        let [low, middle, high] = twice;
        let carry = (low + 5) >> 44;
        let five_more = [(low + 5) & PART, (middle + carry) & PART, high + ((middle + carry) >> 44)];
        let [low, middle, high] = if five_more[2] > LAST { five_more } else { twice };
        u128::from(low) | u128::from(middle) << 44 | u128::from(high) << 88
    }
}

/// Looks at a piece as the kernel does, in whole words. It is slow: for tests, and for a driver without a card.
#[must_use]
pub fn look(piece: &[u8], keys: &Keys) -> ContentCheck {
    let words = piece.as_chunks::<WORD>().0;
    if words.iter().all(|word| *word == [0; WORD]) {
        return ContentCheck::Zero;
    }
    let factor = Number::of_key(keys.word);
    let mut sums = vec![Number::default(); THREADS];
    for row in words.chunks(THREADS) {
        for (sum, word) in sums.iter_mut().zip(row) {
            *sum = sum.times(factor).plus(Number::of(u128::from_le_bytes(*word)));
        }
    }
    for bit in keys.bits.map(Number::of_key) {
        let join = |pair: &[Number; 2]| pair[0].plus(pair[1].times(bit));
        sums = sums.as_chunks().0.iter().map(join).collect();
    }
    let all = sums.first().copied().unwrap_or_default();
    let hash = all.times(Number::of_key(keys.sum)).low();
    ContentCheck::Data(Some(Hash([hash as u64, (hash >> 64) as u64])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys::new(&std::array::from_fn(|i| (i * 151 + 77) as u8))
    }

    fn data(bytes: usize) -> Vec<u8> {
        (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    }

    const GOLDEN: [(usize, (u64, u64)); 2] = [
        (4096, (0x7971_5644_8676_7552, 0xa4bb_0385_7aaf_28a4)),
        (32 * 1024, (0x616d_00c7_ffa3_ac97, 0x5065_026f_648a_bfea)),
    ];
    const GOLDEN_ONES: (u64, u64) = (0x6013_798c_b58f_eec1, 0x78a9_7725_45b9_3ac2);

    /// The values are those of `tests/gpu/content.py`, which computes them with numbers of any length, and asks a card.
    #[test]
    fn the_hash_is_what_it_is_when_it_is_computed_otherwise() {
        for (bytes, expected) in GOLDEN {
            let ContentCheck::Data(Some(Hash([low, high]))) = look(&data(bytes), &keys()) else { panic!() };
            assert_eq!((low, high), expected, "{bytes}");
        }
        let ones = look(&[0xff; 64 * 1024], &keys());
        let ContentCheck::Data(Some(Hash([low, high]))) = ones else { panic!() };
        assert_eq!((low, high), GOLDEN_ONES);
    }

    #[test]
    fn one_byte_anywhere_changes_the_hash_and_zeros_are_known() {
        let mut piece = vec![0; 32 * 1024];
        assert_eq!(look(&piece, &keys()), ContentCheck::Zero);
        let mut seen = Vec::new();
        for at in [0, 1, 15, 16, 8191, 8192, 20_000, 32 * 1024 - 1] {
            piece[at] = 1;
            let now = look(&piece, &keys());
            assert!(matches!(now, ContentCheck::Data(Some(_))) && !seen.contains(&now), "{at}");
            seen.push(now);
            piece[at] = 0;
        }
        let zeros = [piece.clone(), vec![0xff; 32 * 1024]].concat();
        assert_ne!(look(&zeros, &keys()), ContentCheck::Zero);
    }

    #[test]
    fn keys_leave_room_for_carries() {
        let keys = Keys::new(&[0xff; KEY_BYTES]);
        assert_eq!(keys.word, [0x0fff_ffff, 0x0fff_fffc, 0x0fff_fffc, 0x0fff_fffc]);
        assert_eq!((keys.bits[8], keys.sum), (keys.word, keys.word));
        assert_eq!(size_of::<Keys>(), KEY_BYTES);
    }
}
