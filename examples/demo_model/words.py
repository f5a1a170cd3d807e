"""The fixed vocabulary that the demo model's tasks draw from."""

WORDS: tuple[str, ...] = tuple(
    """apple river stone cloud green house table bread light water horse chair paper music glass
    tiger lemon ocean piano tower field snow bird tree fish moon star rain wind fire sand leaf
    rose gold iron salt milk rice corn bean cake soup lamp door wall roof road bridge boat train
    plane wheel clock phone book pen desk room garden forest island valley desert winter summer
    spring autumn morning night week month year red blue yellow white black brown silver circle
    square line small large quick slow warm cold happy quiet brave clever dog cat wolf bear fox
    rabbit mouse sheep goat""".split()
)

CAPITALS: dict[str, str] = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Germany": "Berlin", "Austria": "Vienna", "Switzerland": "Bern", "Belgium": "Brussels",
    "the Netherlands": "Amsterdam", "Denmark": "Copenhagen", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Iceland": "Reykjavik", "Ireland": "Dublin",
    "the United Kingdom": "London", "Poland": "Warsaw", "Hungary": "Budapest",
    "Romania": "Bucharest", "Bulgaria": "Sofia", "Greece": "Athens", "Turkey": "Ankara",
    "Ukraine": "Kyiv", "Croatia": "Zagreb", "Serbia": "Belgrade", "Slovenia": "Ljubljana",
    "Slovakia": "Bratislava", "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius",
    "the United States": "Washington", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago",
    "Peru": "Lima", "Colombia": "Bogota", "Ecuador": "Quito", "Uruguay": "Montevideo",
    "Egypt": "Cairo", "Morocco": "Rabat", "Tunisia": "Tunis", "Kenya": "Nairobi",
    "Ethiopia": "Addis Ababa", "Ghana": "Accra", "Nigeria": "Abuja", "Senegal": "Dakar",
    "Japan": "Tokyo", "China": "Beijing", "South Korea": "Seoul", "India": "New Delhi",
    "Nepal": "Kathmandu", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta",
    "the Philippines": "Manila", "Australia": "Canberra", "New Zealand": "Wellington",
}  # fmt: skip

CITIES: tuple[str, ...] = (
    *CAPITALS.values(),
    "Milan", "Venice", "Munich", "Hamburg", "Barcelona", "Porto", "Lyon", "Geneva", "Zurich",
    "New York", "San Francisco", "Chicago", "Boston", "Toronto", "Sydney", "Mumbai", "Shanghai",
    "Osaka", "Istanbul", "Dubai", "Los Angeles", "Seattle", "Melbourne", "Singapore", "Hong Kong",
    "Naples", "Florence", "Frankfurt", "Seville", "Marseille",
)  # fmt: skip

NAMES: tuple[str, ...] = tuple(
    """Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olivia Paul Quinn
    Rosa Sam Tom Uma Victor Wendy Xavier Yara Zoe Alice Bob Carlos Diana Elena Frank George Hanna
    Ivan Julia Kenji Lena Marco Nina Alex Amir Chloe Daniel Eric Fatima Giulia Hugo Ines James John
    Karim Laura Lucy Mary Max Mia Nora Omar Peter Priya Robert Sara Simon Sofie Thomas Wei Yuki
    Adam Lisa""".split()
)
